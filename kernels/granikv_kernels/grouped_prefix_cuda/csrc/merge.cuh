// Merge of partial attention states by log-sum-exp: one warp per (group, query head).
#pragma once

#include "ptx.cuh"

namespace granikv {

// Partial rows of one member of one item: base + kv_head * kv_stride + split * split_stride + g.
struct alignas(16) MergeEntry {
  int base, kv_stride, splits, split_stride;
};

template <typename PartT, typename OutT>
struct MergeParams {
  const PartT* part_out;
  const float* part_lse;
  const int* offsets;          // [groups + 1] into entries
  const MergeEntry* entries;
  const OutT* own_out;         // [groups, q_heads, D] or null: the state each group starts from (its tail)
  const float* own_lse;        // [groups, q_heads], natural logarithm
  OutT* out;                   // [groups, q_heads, D]
  float* out_lse;              // [groups, q_heads] or null
  const int2* tail_meta;       // [groups * kv_heads] (first id, count) of the fused pass's tail partials, or null
  int tail_base;
  int groups, q_heads, gqa;
};

template <int kCount, typename T>
GRANIKV_DEVICE void load_row(const T* src, float (&dst)[kCount]) {
  if constexpr (sizeof(T) == 4) {
    if constexpr (kCount == 4) {
      const float4 v = *reinterpret_cast<const float4*>(src);
      dst[0] = v.x, dst[1] = v.y, dst[2] = v.z, dst[3] = v.w;
    } else {
      const float2 v = *reinterpret_cast<const float2*>(src);
      dst[0] = v.x, dst[1] = v.y;
    }
  } else {
    T v[kCount];
    if constexpr (kCount == 4) {
      *reinterpret_cast<uint2*>(v) = *reinterpret_cast<const uint2*>(src);
    } else {
      *reinterpret_cast<uint32_t*>(v) = *reinterpret_cast<const uint32_t*>(src);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) dst[i] = static_cast<float>(v[i]);
  }
}

template <typename PartT, typename OutT, int kD>
__global__ __launch_bounds__(128) void merge_kernel(const __grid_constant__ MergeParams<PartT, OutT> p) {
  constexpr int kPer = kD / 32;
  constexpr int kAhead = 8;
  const int lane = threadIdx.x % 32;
  const int pair = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (pair >= p.groups * p.q_heads) return;
  const int group = pair / p.q_heads, head = pair % p.q_heads;
  const int kv_head = head / p.gqa, g = head % p.gqa;
  const int first = p.offsets[group], last = p.offsets[group + 1];
  MergeEntry entry{0, 0, 0, 0};
  if (first < last) entry = p.entries[first];
  grid_dependency_wait();

  float acc[kPer];
  float top = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) acc[i] = 0.0f;
  if (p.own_out != nullptr) {
    const float lse = p.own_lse[pair];
    if (lse > -INFINITY) {  // an empty tail's output is not read: it may be anything
      load_row<kPer>(p.own_out + static_cast<size_t>(pair) * kD + lane * kPer, acc);
      top = lse;
      sum = 1.0f;
    }
  }
  const auto add = [&](int base, int splits, int stride) {
    for (int s0 = 0; s0 < splits; s0 += 32) {
      const int s = s0 + lane;
      const float lse = s < splits ? p.part_lse[base + s * stride] : -INFINITY;
      float peak = lse;
#pragma unroll
      for (int d = 16; d > 0; d /= 2) peak = fmaxf(peak, __shfl_xor_sync(0xffffffff, peak, d));
      const float next = fmaxf(top, peak);
      if (next == -INFINITY) continue;
      const float keep = __expf(top - next);
      float weight = __expf(lse - next), total = weight;
#pragma unroll
      for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(0xffffffff, total, d);
      sum = sum * keep + total;
      top = next;
#pragma unroll
      for (int i = 0; i < kPer; ++i) acc[i] *= keep;
      const int count = min(32, splits - s0);
      const PartT* src = p.part_out + static_cast<size_t>(base + s0 * stride) * kD + lane * kPer;
      const size_t step = static_cast<size_t>(stride) * kD;
      for (int j0 = 0; j0 < count; j0 += kAhead) {
        float v[kAhead][kPer];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          if (j0 + j < count) load_row<kPer>(src + (j0 + j) * step, v[j]);
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          if (j0 + j < count) {
            const float w = __shfl_sync(0xffffffff, weight, j0 + j);
#pragma unroll
            for (int i = 0; i < kPer; ++i) acc[i] += w * v[j][i];
          }
        }
      }
    }
  };
  for (int e = first; e < last; ++e) {
    if (e != first) entry = p.entries[e];
    add(entry.base + kv_head * entry.kv_stride + g, entry.splits, entry.split_stride);
  }
  if (p.tail_meta != nullptr) {
    const int2 tail = p.tail_meta[group * (p.q_heads / p.gqa) + kv_head];
    add(p.tail_base + tail.x * p.gqa + g, tail.y, p.gqa);
  }
  const float inv = sum > 0.0f ? 1.0f / sum : 0.0f;
  OutT* out = p.out + static_cast<size_t>(pair) * kD + lane * kPer;
  if constexpr (kPer == 4) {
    *reinterpret_cast<uint2*>(out) =
        make_uint2(pack2<OutT>(acc[0] * inv, acc[1] * inv), pack2<OutT>(acc[2] * inv, acc[3] * inv));
  } else {
    *reinterpret_cast<uint32_t*>(out) = pack2<OutT>(acc[0] * inv, acc[1] * inv);
  }
  if (p.out_lse != nullptr && lane == 0) p.out_lse[pair] = sum > 0.0f ? top + logf(sum) : -INFINITY;
}

}  // namespace granikv
