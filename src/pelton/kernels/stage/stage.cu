// Lays a step's packed inputs out in the device's memory, reading them from page-locked host memory.
//
// The buffer is int32: how many pairs there are, the values of all inputs one after another, then pairs. Segment s
// begins at value starts[s] and goes to the device shifts[s] places further on. A pair is a place of the device's
// memory and what to put there: the entries of block tables that have changed. Token ids below zero, of the first
// segment, stand for tokens that the step before has sampled: -1 for its row 0.
//
// All that changes between steps of one size is in the buffer, so that a graph can have the launch. The host's memory
// is two microseconds away, and every line of it that is asked for costs more: a step of one sequence has but one.
//
// Constants: SEGMENTS, THREADS.
#define DEVICE __device__ __forceinline__

struct Segments {
    int starts[SEGMENTS], shifts[SEGMENTS];
};

DEVICE void launch_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the kernel before has ended, where this one was launched ahead of its end.
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// `n` values, of which the first `ids` are token ids.
extern "C" __global__ void __launch_bounds__(THREADS)
    stage(const int* packed, int* inputs, const int* sampled, int n, int ids, const __grid_constant__ Segments segments) {
    launch_next();
    const int first = blockIdx.x * THREADS + threadIdx.x, all = gridDim.x * THREADS;
    const int* values = packed + 1;
    const int* pairs = values + n;
    int value = first < n ? values[first] : 0;
    const int count = packed[0];
    wait_for_previous();
    for (int i = first; i < n;) {
        // Where nothing could be sampled the result is dropped, and any token will do.
        if (value < 0 && i < ids) value = max(sampled[-1 - value], 0);
        int shift = 0;
#pragma unroll
        for (int s = 0; s < SEGMENTS; ++s)
            if (i >= segments.starts[s]) shift = segments.shifts[s];
        inputs[i + shift] = value;
        i += all;
        if (i < n) value = values[i];
    }
    for (int i = first; i < count; i += all) inputs[pairs[2 * i]] = pairs[2 * i + 1];
}
