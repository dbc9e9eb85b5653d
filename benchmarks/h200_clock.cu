// What the clocks of each multiprocessor say: its cycles and the GPU's nanoseconds. One block for each.
extern "C" __global__ void clocks(unsigned long long* out) {
    if (threadIdx.x) return;
    unsigned sm;
    unsigned long long time;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    out[2 * sm] = clock64(), out[2 * sm + 1] = time;
}
