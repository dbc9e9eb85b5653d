// What hopper_products.cu and hopper_blocks.cu, whose constants these are, do alike in a cluster: copies of the
// weight's rows, and barriers.
#pragma once
#include "shared.cuh"

// Rows of the weight; with SHARE, to the same place of all blocks of the cluster in `blocks`, and of their barriers.
DEVICE void copy_rows(u32 target, const TensorMap* map, u32 barrier, int column, int row, u16 blocks) {
    if (GATED && SHARE > 1)
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
            "[%1, {%3, %4, %4, %5}], [%2], %6;" ::"r"(target),
            "l"(map), "r"(barrier), "r"(column), "r"(0), "r"(row / 8), "h"(blocks)
            : "memory");
    else if (GATED)
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %4, %5}], "
            "[%2];" ::"r"(target),
            "l"(map), "r"(barrier), "r"(column), "r"(0), "r"(row / 8)
            : "memory");
    else if (SHARE > 1)
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
            "[%1, {%3, %4}], [%2], %5;" ::"r"(target),
            "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(blocks)
            : "memory");
    else copy_2d(target, map, barrier, column, row);
}

DEVICE void copy_floats(u32 target, const float* from, u32 count, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
                 "l"(from), "r"(4 * count), "r"(barrier)
                 : "memory");
}

DEVICE u32 of_block(u32 address, int rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

DEVICE void arrive_at_block(u32 barrier, int rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(of_block(barrier, rank)) : "memory");
}

// To an address in another block's shared memory, whose barrier counts the bytes.
DEVICE void send_4(float x, float y, float z, float w, u32 there, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     there),
                 "f"(x), "f"(y), "f"(z), "f"(w), "r"(barrier)
                 : "memory");
}
// What a thread did before is not made known, which would cost a fence of the whole GPU: a barrier's first phase is, by its
// own fence.
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_sync() {
    if (CLUSTER == 1) return;
    cluster_arrive();
    cluster_wait();
}
