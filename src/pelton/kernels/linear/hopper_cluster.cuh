// What hopper_products.cu and hopper_blocks.cu, whose constants these are, do alike in a cluster: copies of the
// weight's rows, and barriers.
#pragma once

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

DEVICE u32 of_block(u32 address, int rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

DEVICE void arrive_at_block(u32 barrier, int rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(of_block(barrier, rank)) : "memory");
}

DEVICE void cluster_sync() {
    if (CLUSTER == 1) return;
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
