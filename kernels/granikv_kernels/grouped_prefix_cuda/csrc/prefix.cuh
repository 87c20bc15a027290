// Attention of many query rows against contiguous runs of the KV cache.
//
// A CTA is one producer warpgroup (TMA) and kWg consumer warpgroups of 64 query rows each. The grid is persistent: CTA c
// works through units[0 * grid + c], units[1 * grid + c], ... until a unit of length 0.
//
// With clusters of two, a **paired** unit gives the two CTAs neighbouring row tiles of one chunk: each loads one half of
// every K and V tile and multicasts it to both, which halves the traffic out of L2, the limit of a 128-row tile otherwise.
// A **solo** unit is one CTA's own. A cluster has its paired units first: stages of the two CTAs stay in step only there.
#pragma once

#include "consumer.cuh"
#include "merge.cuh"
#include "shape.cuh"
#include "tail.cuh"

namespace granikv {

// What a launch that also does the tails needs: it merges everything itself, after a barrier of the whole grid.
template <typename T, typename PartT>
struct FusedParams {
  TailParams tail;
  MergeParams<PartT, T> merge;
  unsigned long long* arrivals;  // counts CTAs over all launches, never reset
};

template <typename C>
GRANIKV_DEVICE TailRows tail_rows(uint8_t* smem) {
  using Shape = typename C::Tail;
  int* at = reinterpret_cast<int*>(smem + C::kTailOffset + Shape::kRingBytes);
  return {at, at + Shape::kMaxRows, at + 2 * Shape::kMaxRows, at + 3 * Shape::kMaxRows};
}

constexpr int kTailDoneBarrier = 9, kGridDoneBarrier = 10;

// The producer's three other warps.
template <typename C>
GRANIKV_DEVICE void run_tail(const PrefixParams<typename C::PartT>& p,
                             const FusedParams<typename C::T, typename C::PartT>& fused, uint8_t* smem) {
  using Shape = typename C::Tail;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0) - 1;
  TailWarp<typename C::T, typename C::PartT, C::kD, Shape::kRing> worker{
      fused.tail,
      static_cast<const typename C::T*>(p.q),
      p.q_row_stride,
      p.part_out,
      p.part_lse,
      p.gqa,
      p.scale_log2,
      tail_rows<C>(smem),
      smem_addr(smem + C::kTailOffset) + warp * Shape::kRing * 2 * Shape::kHalf,
      static_cast<int>(threadIdx.x % 32),
      static_cast<int>(blockIdx.x) * Shape::kWarps + warp,
      static_cast<int>(gridDim.x) * Shape::kWarps};
  worker.read_rows(warp);
  GRANIKV_TRACE(6, threadIdx.x == 32);
  worker.run();
  GRANIKV_TRACE(8, threadIdx.x == 32);
  bar_arrive(kTailDoneBarrier, 32 * Shape::kWarps + 128 * C::kWg);
}

// Consumers: wait for all CTAs, then each warp merges its share of (row, KV head). Every CTA of the grid is resident
// (one an SM, a cooperative launch), so waiting for the others cannot hang.
template <typename C>
GRANIKV_DEVICE void merge_all(const FusedParams<typename C::T, typename C::PartT>& fused, uint8_t* smem) {
  const auto& m = fused.merge;
  const TailParams& t = fused.tail;
  const int lane = threadIdx.x % 32;
  const int warp = (threadIdx.x - 128) / 32;
  const TailRows rows = tail_rows<C>(smem);
  bar_sync(kTailDoneBarrier, 32 * C::Tail::kWarps + 128 * C::kWg);
  GRANIKV_TRACE(9, threadIdx.x == 128);
  unsigned long long target = 0;
  if (threadIdx.x == 128) {
    __threadfence();
    const unsigned long long ticket = atomicAdd(fused.arrivals, 1ull);
    target = (ticket / gridDim.x + 1) * gridDim.x;
  }
  const int share = tail_share(tail_total(rows, t.rows, t.kv_heads), gridDim.x * C::Tail::kWarps);
  // As few heads a task as keep to one task a warp: the whole GPU merges a small batch, and loads are in flight together.
  const int warps = 4 * C::kWg * gridDim.x;
  const int heads = t.rows * m.q_heads <= warps ? 1 : t.rows * t.kv_heads * ((m.gqa + 1) / 2) <= warps ? 2 : 4;
  const int per_kv = (m.gqa + heads - 1) / heads, tasks = t.rows * t.kv_heads * per_kv;
  bool waited = false;
  for (int task = warp * gridDim.x + blockIdx.x; task < tasks || !waited; task += warps) {
    const bool mine = task < tasks;
    const int unit = task / per_kv, g0 = (task - unit * per_kv) * heads;
    const int row = unit / t.kv_heads, head = unit - row * t.kv_heads;
    const auto tail = [&](PartList& list, int at) {
      const int2 parts = tail_partials(rows, row, head, t.kv_heads, share);
      list.add(t.part_base + parts.x * m.gqa, parts.y, m.gqa, at);
    };
    PartList list;
    if (mine) {
      list = list_items(m, row, head, lane);
      tail(list, lane);
    }
    if (!waited) {
      if (threadIdx.x == 128) {
        unsigned long long seen;
        do {
          asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(fused.arrivals) : "memory");
        } while (seen < target);
      }
      __syncwarp();
      bar_sync(kGridDoneBarrier, 128 * C::kWg);
      waited = true;
      GRANIKV_TRACE(10, threadIdx.x == 128);
    }
    if (!mine) break;
    if (heads == 1) {
      merge_heads<C::kD, 1>(m, row, head, g0, lane, list, tail);
    } else if (heads == 2) {
      merge_heads<C::kD, 2>(m, row, head, g0, lane, list, tail);
    } else {
      merge_heads<C::kD, 4>(m, row, head, g0, lane, list, tail);
    }
  }
  GRANIKV_TRACE(11, threadIdx.x == 128);
}

template <typename C>
__global__ __launch_bounds__(C::kThreads, C::kCtasPerSm) void prefix_kernel(
    const __grid_constant__ CUtensorMap kmap, const __grid_constant__ CUtensorMap vmap,
    const __grid_constant__ PrefixParams<typename C::PartT> p,
    const __grid_constant__ FusedParams<typename C::T, typename C::PartT> fused) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const SharedView<C> sm(smem_addr(smem));
  const int group = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const uint32_t rank = C::kCluster == 1 ? 0 : cluster_rank();
  GRANIKV_TRACE_START(threadIdx.x == 0);
  if (threadIdx.x == 0) {
    tma_prefetch_map(&kmap);
    tma_prefetch_map(&vmap);
    for (int i = 0; i < C::kStages; ++i) {
      mbar_init(sm.k_full + 8 * i, 1);
      mbar_init(sm.v_full + 8 * i, 1);
      mbar_init(sm.k_empty + 8 * i, 4 * C::kWg * C::kCluster);
      mbar_init(sm.v_empty + 8 * i, 4 * C::kWg * C::kCluster);
    }
    fence_barrier_init();
  }
  if constexpr (C::kCluster == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }
  if (group == 0) {
    regs_dec<C::kProducerRegs>();
    if (threadIdx.x == 0) produce<C>(sm, &kmap, &vmap, p.units, p.max_rounds, rank);
    __syncwarp();
    if constexpr (C::kTail) {
      if (threadIdx.x >= 32 && fused.tail.rows > 0) run_tail<C>(p, fused, smem);
    }
    grid_launch_dependents();
  } else {
    regs_inc<C::kConsumerRegs>();
    Consumer<C> consumer(sm, p, group - 1, rank);
    if (group == C::kWg) consumer.turn_pass();  // the first turn is the first warpgroup's
    for (int round = 0; round < p.max_rounds; ++round) {
      const int place = round * gridDim.x + blockIdx.x;
      const int4* src = reinterpret_cast<const int4*>(p.units + place);
      const int4 a = __ldg(src), b = __ldg(src + 1);
      consumer.load_q(place);
      if (a.y == 0) break;
      GRANIKV_TRACE(2, threadIdx.x == 128);
      const Unit u{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      consumer.run_unit(u);
    }
    if constexpr (C::kTail) {
      if (fused.tail.rows > 0) merge_all<C>(fused, smem);
    }
    grid_launch_dependents();
  }
  // A peer may still multicast into this CTA, or arrive on its barriers, until it is done too.
  if constexpr (C::kCluster > 1) cluster_sync();
}

}  // namespace granikv
