// The consumer side of the prefix pass: GEMMs on the tensor cores and the online softmax between them.
#pragma once

#include "shape.cuh"
#include "wgmma.inc"

namespace granikv {

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
  uint32_t qa[C::kQRegs ? kD / 4 : 4];
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
    if constexpr (C::kQRegs) {
      load_q_regs(place);
    } else {
      load_q_shared(place);
    }
  }
  // As the A operand: of each 16 elements, pairs 2 (lane % 4) and 8 later, of rows lane / 4 and 8 further down.
  __device__ __forceinline__ void load_q_regs(int place) {
    const int* rows = p.unit_rows + static_cast<size_t>(place) * C::kM + wg * 64 + warp * 16 + lane / 4;
    const int source[2] = {__ldg(rows), __ldg(rows + 8)};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const T* src = static_cast<const T*>(p.q) + (source[r] >> 8) * p.q_row_stride + (source[r] & 255) * kD +
                     2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < kD / 8; ++i)
        qa[2 * i + r] = source[r] >= 0 ? __ldg(reinterpret_cast<const uint32_t*>(src + 8 * i)) : 0u;
    }
  }
  __device__ __forceinline__ void load_q_shared(int place) {
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
      const uint64_t b = smem_desc(k + (i / 4) * kN * 128 + in_panel, 16, 1024);
      if constexpr (C::kQRegs) {
        Wgmma<kN, T>::rs_k(s, qa + 4 * i, b, i != 0);
      } else {
        Wgmma<kN, T>::ss(s, smem_desc(q + (i / 4) * 8192 + in_panel, 16, 1024), b, i != 0);
      }
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

}  // namespace granikv
