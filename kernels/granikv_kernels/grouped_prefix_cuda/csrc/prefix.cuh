// Attention of many query rows against contiguous runs of the KV cache.
//
// A CTA is one producer warpgroup (TMA) and kWg consumer warpgroups of 64 query rows each. The grid is persistent: CTA c
// works through units[0 * grid + c], units[1 * grid + c], ... until a unit of length 0.
//
// With clusters of two, a **paired** unit gives the two CTAs neighbouring row tiles of one chunk: each loads one half of
// every K and V tile and multicasts it to both, which halves the traffic out of L2, the limit of a 128-row tile otherwise.
// A **solo** unit is one CTA's own. A cluster has its paired units first: stages of the two CTAs stay in step only there.
#pragma once

#include "merge.cuh"
#include "ptx.cuh"
#include "tail.cuh"
#include "wgmma.inc"

namespace granikv {

struct alignas(16) Unit {
  int slot;     // first slot of the chunk
  int len;      // slots in the chunk; 0 ends a CTA's list
  int kv_head;
  int member;   // index of the item's first member; the host's
  int row;      // first stacked row (member * gqa + g) of the tile
  int rows;     // stacked rows of the tile; 0 for the idle half of a pair
  int part;     // partial-output row of stacked row `row`
  int paired;   // 1: the other CTA of the cluster has the same chunk in this round
};

template <typename PartT>
struct PrefixParams {
  const void* q;
  const Unit* units;
  const int* unit_rows;  // [rounds, grid, kM]: row << 8 | query head of each stacked row, -1 past the last
  PartT* part_out;   // [partial rows, D], normalised
  float* part_lse;   // [partial rows], natural logarithm
  long long q_row_stride;
  int gqa;
  int max_rounds;
  float scale_log2;  // sm_scale * log2(e)
};

template <typename T_, typename PartT_, int kD_, int kWg_, int kN_, int kStages_, int kCluster_, int kCtasPerSm_, bool kTail_>
struct PrefixConfig {
  using T = T_;
  using PartT = PartT_;
  static constexpr int kD = kD_, kWg = kWg_, kN = kN_, kStages = kStages_, kCluster = kCluster_;
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr bool kTail = kTail_;  // the producer's warpgroup also does private tails
  static constexpr int kM = 64 * kWg;
  static constexpr int kThreads = 128 * (kWg + 1);
  static constexpr int kPanels = kD / 64;              // 64 elements = one 128-byte swizzled row
  static constexpr int kTileBytes = kN * kD * 2;       // one K or V tile
  static constexpr int kQBytes = kM * kD * 2;
  static constexpr int kBoxRows = kN / kCluster;
  static constexpr int kBarOffset = kQBytes + 2 * kStages * kTileBytes;
  static constexpr int kTailOffset = kBarOffset + 256;  // rows of a tail tile lie on their own size
  static constexpr int kSmem = kTail ? kTailOffset + TailShape<kD>::kBytes : kTailOffset;
  // What ptxas hands out at launch, and how setmaxnreg deals it out again.
  static constexpr int kProducerRegs = kTail ? 120 : kWg == 3 ? 32 : 40;
  static constexpr int kConsumerRegs = kWg == 1 ? (kCtasPerSm == 2 ? 208 : 240) : kWg == 2 ? (kTail ? 192 : 232) : 160;
  static_assert(kD == 64 || kD == 128, "head size");
  static_assert(4 * kStages * 8 <= 256 && (!kTail || kWg == 2), "layout");
  static_assert(kN % 16 == 0 && kN <= 256 && kBoxRows % 8 == 0, "tile");
  static_assert(kSmem * kCtasPerSm <= (228 - kCtasPerSm) * 1024, "shared memory");
};

// Circular stage index and its phase bit.
template <int kStages>
struct Stage {
  int index = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++index == kStages) {
      index = 0;
      phase ^= 1;
    }
  }
};

template <typename C>
struct SharedView {
  uint32_t q, k, v, k_full, v_full, k_empty, v_empty;
  __device__ __forceinline__ explicit SharedView(uint32_t base)
      : q(base),
        k(base + C::kQBytes),
        v(k + C::kStages * C::kTileBytes),
        k_full(base + C::kBarOffset),
        v_full(k_full + 8 * C::kStages),
        k_empty(v_full + 8 * C::kStages),
        v_empty(k_empty + 8 * C::kStages) {}
};

// One thread: keeps the K and V stages filled, blocks of a unit from the last to the first.
template <typename C>
GRANIKV_DEVICE void produce(const SharedView<C>& sm, const CUtensorMap* kmap, const CUtensorMap* vmap,
                            const Unit* units, int max_rounds, uint32_t rank) {
  Stage<C::kStages> st;
  bool paired = false;
  const auto load = [&](uint32_t tile, const CUtensorMap* map, uint32_t bar, int head, int slot) {
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel) {
      const uint32_t dst = tile + panel * C::kN * 128;
      if (C::kCluster > 1 && paired) {
        tma_load_3d_multicast(dst + rank * C::kBoxRows * 128, map, bar, panel * 64, head,
                              slot + static_cast<int>(rank) * C::kBoxRows, (1 << C::kCluster) - 1);
      } else {
#pragma unroll
        for (int part = 0; part < C::kCluster; ++part)
          tma_load_3d(dst + part * C::kBoxRows * 128, map, bar, panel * 64, head, slot + part * C::kBoxRows);
      }
    }
  };
  for (int round = 0; round < max_rounds; ++round) {
    const Unit* unit = units + static_cast<size_t>(round) * gridDim.x + blockIdx.x;
    const int4 head = *reinterpret_cast<const int4*>(unit);
    if (head.y == 0) break;
    if constexpr (C::kCluster > 1) paired = unit->paired != 0;
    for (int block = (head.y + C::kN - 1) / C::kN - 1; block >= 0; --block) {
      const int slot = head.x + block * C::kN;
      mbar_wait(sm.k_empty + 8 * st.index, st.phase ^ 1);
      mbar_expect_tx(sm.k_full + 8 * st.index, C::kTileBytes);
      load(sm.k + st.index * C::kTileBytes, kmap, sm.k_full + 8 * st.index, head.z, slot);
      mbar_wait(sm.v_empty + 8 * st.index, st.phase ^ 1);
      mbar_expect_tx(sm.v_full + 8 * st.index, C::kTileBytes);
      load(sm.v + st.index * C::kTileBytes, vmap, sm.v_full + 8 * st.index, head.z, slot);
      st.next();
    }
  }
}

// One consumer warpgroup: 64 stacked rows, all blocks of every unit.
template <typename C>
struct Consumer {
  using T = typename C::T;
  static constexpr int kD = C::kD, kN = C::kN;
  // With log2-scale maxima, a row may outgrow its reference maximum by this much before the output is rescaled: P stays
  // below 2^8, where bf16 is as precise as anywhere and fp32 sums are far from overflow.
  static constexpr float kSlack = 8.0f;

  const SharedView<C>& sm;
  const PrefixParams<typename C::PartT>& p;
  const int wg, thread, lane, warp;
  const uint32_t rank;
  bool paired = false;
  Stage<C::kStages> kst, vst;
  float o[kD / 2];
  float s[kN / 2];
  uint32_t pa[kN / 4];
  float row_max[2], row_sum[2], alpha[2];

  __device__ __forceinline__ Consumer(const SharedView<C>& sm_, const PrefixParams<typename C::PartT>& p_, int wg_,
                                      uint32_t rank_)
      : sm(sm_), p(p_), wg(wg_), thread(threadIdx.x % 128), lane(threadIdx.x % 32), warp((threadIdx.x % 128) / 32),
        rank(rank_) {}

  __device__ __forceinline__ void release(uint32_t bar) {
    if constexpr (C::kCluster == 1) {
      if (lane == 0) mbar_arrive(bar);
    } else {
      // The barrier counts both CTAs' warps; a solo unit's warps stand in for the peer's by arriving twice.
      if (lane < C::kCluster) mbar_arrive_cta(bar, paired ? lane : rank);
    }
  }

  // Ping-pong: warpgroups issue their GEMMs in turn, so that one's softmax runs beside another's GEMMs.
  __device__ __forceinline__ void turn_wait() {
    if constexpr (C::kWg > 1) bar_sync(1 + wg, 256);
  }
  __device__ __forceinline__ void turn_pass() {
    if constexpr (C::kWg > 1) bar_arrive(1 + (wg + 1 == C::kWg ? 0 : wg + 1), 256);
  }

  // Needs the unit's place only, not the unit: one wait for memory less before the first product.
  __device__ __forceinline__ void load_q(int place) {
    constexpr int kChunks = kD / 8;            // 16-byte chunks of a row
    constexpr int kStep = 128 / kChunks;       // rows the warpgroup covers at a time
    const int chunk = thread % kChunks;
    const uint32_t base = sm.q + wg * 64 * kD * 2 + (chunk / 8) * 8192;
    int4 value[64 / kStep];
    int source[64 / kStep];
#pragma unroll
    for (int i = 0; i < 64 / kStep; ++i)
      source[i] = __ldg(p.unit_rows + static_cast<size_t>(place) * C::kM + wg * 64 + thread / kChunks + i * kStep);
#pragma unroll
    for (int i = 0; i < 64 / kStep; ++i) {
      value[i] = make_int4(0, 0, 0, 0);
      if (source[i] >= 0) {
        const T* src = static_cast<const T*>(p.q) + (source[i] >> 8) * p.q_row_stride + (source[i] & 255) * kD;
        value[i] = __ldg(reinterpret_cast<const int4*>(src) + chunk);
      }
    }
    bar_sync(5 + wg, 128);  // every warp of this warpgroup is done with the previous unit's Q
#pragma unroll
    for (int i = 0; i < 64 / kStep; ++i) {
      const int r = thread / kChunks + i * kStep;
      const uint32_t dst = base + r * 128 + (((chunk % 8) ^ (r % 8)) << 4);
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(value[i].x), "r"(value[i].y),
                   "r"(value[i].z), "r"(value[i].w)
                   : "memory");
    }
    fence_async_proxy();
    bar_sync(5 + wg, 128);
  }

  __device__ __forceinline__ void issue_qk() {
    const uint32_t q = sm.q + wg * 64 * kD * 2;
    const uint32_t k = sm.k + kst.index * C::kTileBytes;
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      const uint32_t in_panel = (i % 4) * 32;
      Wgmma<kN, T>::ss(s, smem_desc(q + (i / 4) * 8192 + in_panel, 16, 1024),
                       smem_desc(k + (i / 4) * kN * 128 + in_panel, 16, 1024), i != 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_pv() {
    const uint32_t v = sm.v + vst.index * C::kTileBytes;
#pragma unroll
    for (int i = 0; i < kN / 16; ++i)
      Wgmma<kD, T>::rs(o, pa + 4 * i, smem_desc(v + i * 2048, kN * 128, 1024));
    wgmma_commit();
  }

  // Scores -> exponentials in place. Returns (the same for the whole warp) whether the output must be rescaled.
  __device__ __forceinline__ bool softmax(bool first) {
    float top[2] = {s[0], s[2]};
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      top[0] = fmaxf(top[0], fmaxf(s[4 * j], s[4 * j + 1]));
      top[1] = fmaxf(top[1], fmaxf(s[4 * j + 2], s[4 * j + 3]));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffff, top[r], 1));
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffff, top[r], 2)) * p.scale_log2;
    }
    bool rescale = false;
    if (first) {
      row_max[0] = top[0];
      row_max[1] = top[1];
      row_sum[0] = row_sum[1] = 0.0f;
    } else {
      rescale = __any_sync(0xffffffff, top[0] > row_max[0] + kSlack || top[1] > row_max[1] + kSlack);
      if (rescale) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float next = fmaxf(row_max[r], top[r]);
          alpha[r] = exp2_fast(row_max[r] - next);
          row_sum[r] *= alpha[r];
          row_max[r] = next;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[4 * j + e] = exp2_fast(__fmaf_rn(s[4 * j + e], p.scale_log2, -row_max[e / 2]));
        row_sum[e / 2] += s[4 * j + e];
      }
    }
    return rescale;
  }

  __device__ __forceinline__ void pack_p() {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) pa[i] = pack2<T>(s[2 * i], s[2 * i + 1]);
  }

  // Accumulator element (j, e) is column 8 j + 2 (lane % 4) + e % 2; slots past the chunk may hold anything, NaN included.
  __device__ __forceinline__ void mask(int valid) {
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (8 * j + 2 * (lane % 4) + e % 2 >= valid) s[4 * j + e] = -INFINITY;
      }
    }
  }

  // 0 * NaN is NaN, so V rows past the chunk are zeroed in shared memory, by all consumers of the CTA together.
  __device__ __forceinline__ void zero_v(int valid) {
    const uint32_t v = sm.v + vst.index * C::kTileBytes;
    for (int i = wg * 128 + thread; i < (kN - valid) * C::kPanels * 8; i += 128 * C::kWg) {
      const int row = valid + i / (8 * C::kPanels);
      const int chunk = i % (8 * C::kPanels);
      const uint32_t dst = v + (chunk / 8) * kN * 128 + row * 128 + (chunk % 8) * 16;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(dst), "r"(0) : "memory");
    }
    fence_async_proxy();
    bar_sync(4, 128 * C::kWg);
  }

  // Its Q has been loaded.
  __device__ __forceinline__ void run_unit(const Unit& u) {
    paired = u.paired != 0;
    const int blocks = (u.len + kN - 1) / kN;
    const int valid = u.len - (blocks - 1) * kN;  // of the last block, which comes first
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) o[i] = 0.0f;

    mbar_wait(sm.k_full + 8 * kst.index, kst.phase);
    wgmma_fence();
    issue_qk();
    wgmma_wait<0>();
    pin(s);
    release(sm.k_empty + 8 * kst.index);
    kst.next();
    GRANIKV_TRACE(3, wg == 0 && thread == 0);
    if (valid < kN) mask(valid);
    softmax(true);
    pack_p();
    if (valid < kN) {
      mbar_wait(sm.v_full + 8 * vst.index, vst.phase);
      zero_v(valid);
    }

#pragma unroll 1
    for (int block = 1; block < blocks; ++block) {
      mbar_wait(sm.k_full + 8 * kst.index, kst.phase);
      turn_wait();
      pin(s);
      pin(o);
      wgmma_fence();
      issue_qk();
      mbar_wait(sm.v_full + 8 * vst.index, vst.phase);
      wgmma_fence();
      issue_pv();
      turn_pass();
      wgmma_wait<1>();
      pin(s);
      release(sm.k_empty + 8 * kst.index);
      kst.next();
      const bool rescale = softmax(false);
      wgmma_wait<0>();
      pin(o);
      release(sm.v_empty + 8 * vst.index);
      vst.next();
      pack_p();
      if (rescale) {
#pragma unroll
        for (int j = 0; j < kD / 8; ++j) {
          o[4 * j] *= alpha[0];
          o[4 * j + 1] *= alpha[0];
          o[4 * j + 2] *= alpha[1];
          o[4 * j + 3] *= alpha[1];
        }
      }
    }
    mbar_wait(sm.v_full + 8 * vst.index, vst.phase);
    pin(o);
    wgmma_fence();
    issue_pv();
    wgmma_wait<0>();
    pin(o);
    release(sm.v_empty + 8 * vst.index);
    vst.next();
    GRANIKV_TRACE(4, wg == 0 && thread == 0);
    store(u);
    GRANIKV_TRACE(5, wg == 0 && thread == 0);
  }

  __device__ __forceinline__ void store(const Unit& u) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_sum[r] += __shfl_xor_sync(0xffffffff, row_sum[r], 1);
      row_sum[r] += __shfl_xor_sync(0xffffffff, row_sum[r], 2);
      const int local = wg * 64 + warp * 16 + lane / 4 + 8 * r;
      if (local >= u.rows) continue;
      const float inv = 1.0f / row_sum[r];
      typename C::PartT* out = p.part_out + static_cast<size_t>(u.part + local) * kD + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kD / 8; ++j) {
        const float a = o[4 * j + 2 * r] * inv, b = o[4 * j + 2 * r + 1] * inv;
        if constexpr (sizeof(typename C::PartT) == 4) {
          *reinterpret_cast<float2*>(out + 8 * j) = make_float2(a, b);
        } else {
          *reinterpret_cast<uint32_t*>(out + 8 * j) = pack2<typename C::PartT>(a, b);
        }
      }
      if (lane % 4 == 0) p.part_lse[u.part + local] = (row_max[r] + __log2f(row_sum[r])) * 0.69314718055994531f;
    }
  }
};

// What a launch that also does the tails needs: it merges everything itself, after a barrier of the whole grid.
template <typename T, typename PartT>
struct FusedParams {
  TailParams tail;
  MergeParams<PartT, T> merge;
  unsigned long long* arrivals;  // counts CTAs over all launches; never reset
};

template <typename C>
GRANIKV_DEVICE TailRows tail_rows(uint8_t* smem) {
  using Shape = TailShape<C::kD>;
  int* at = reinterpret_cast<int*>(smem + C::kTailOffset + Shape::kRingBytes);
  return {at, at + Shape::kMaxRows, at + 2 * Shape::kMaxRows, at + 3 * Shape::kMaxRows};
}

constexpr int kTailDoneBarrier = 9, kGridDoneBarrier = 10;

template <typename C>
GRANIKV_DEVICE void run_tail(const PrefixParams<typename C::PartT>& p,
                             const FusedParams<typename C::T, typename C::PartT>& fused, uint8_t* smem) {
  using Shape = TailShape<C::kD>;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0) - 1;
  TailWarp<typename C::T, typename C::PartT, C::kD> worker{
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
  const int per_head = worker.read_rows(warp);
  GRANIKV_TRACE(6, threadIdx.x == 32);
  worker.run(per_head);
  GRANIKV_TRACE(8, threadIdx.x == 32);
  bar_arrive(kTailDoneBarrier, 32 * Shape::kWarps + 128 * C::kWg);
}

// Consumers: wait for all CTAs, then each warp merges its share of (row, KV head). Every CTA of the grid is resident
// (one an SM, a cooperative launch), so waiting for the others cannot hang.
template <typename C>
GRANIKV_DEVICE void merge_all(const FusedParams<typename C::T, typename C::PartT>& fused, uint8_t* smem) {
  const auto& m = fused.merge;
  const TailParams& t = fused.tail;
  const int lane = threadIdx.x % 32, workers = gridDim.x * TailShape<C::kD>::kWarps;
  const int warp = (threadIdx.x - 128) / 32;
  const TailRows rows = tail_rows<C>(smem);
  bar_sync(kTailDoneBarrier, 32 * TailShape<C::kD>::kWarps + 128 * C::kWg);
  GRANIKV_TRACE(9, threadIdx.x == 128);
  unsigned long long target = 0;
  if (threadIdx.x == 128) {
    __threadfence();
    const unsigned long long ticket = atomicAdd(fused.arrivals, 1ull);
    target = (ticket / gridDim.x + 1) * gridDim.x;
  }
  const int per_head = rows.first_tile[t.rows - 1] + rows.tiles(t.rows - 1);
  const int share = tail_share(per_head, t.kv_heads, workers);
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
