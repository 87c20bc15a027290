// Merge of partial attention states by log-sum-exp: one warp per (group, a few query heads of one KV head).
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
  int groups, q_heads, gqa;
};

// Not through L1: other CTAs of the same launch may have written these lines since this one last saw them.
template <int kCount, typename T>
GRANIKV_DEVICE void load_row(const T* src, float (&dst)[kCount]) {
  if constexpr (sizeof(T) == 4) {
    if constexpr (kCount == 4) {
      const float4 v = __ldcg(reinterpret_cast<const float4*>(src));
      dst[0] = v.x, dst[1] = v.y, dst[2] = v.z, dst[3] = v.w;
    } else {
      const float2 v = __ldcg(reinterpret_cast<const float2*>(src));
      dst[0] = v.x, dst[1] = v.y;
    }
  } else {
    T v[kCount];
    if constexpr (kCount == 4) {
      *reinterpret_cast<uint2*>(v) = __ldcg(reinterpret_cast<const uint2*>(src));
    } else {
      *reinterpret_cast<uint32_t*>(v) = __ldcg(reinterpret_cast<const unsigned int*>(src));
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) dst[i] = static_cast<float>(v[i]);
  }
}

// The partial results of one (group, KV head), 32 at a time: lane i holds the i-th one's row for the first query head.
struct PartList {
  int row = -1;
  int count = 0;

  __device__ __forceinline__ void add(int base, int splits, int stride, int at) {
    const int s = at - count;
    if (s >= 0 && s < splits) row = base + s * stride;
    count += splits;
  }
};

template <typename PartT, typename OutT>
GRANIKV_DEVICE PartList list_items(const MergeParams<PartT, OutT>& p, int group, int kv_head, int at) {
  PartList list;
  const int first = p.offsets[group], last = p.offsets[group + 1];
  for (int e = first; e < last; ++e) {
    const MergeEntry entry = p.entries[e];
    list.add(entry.base + kv_head * entry.kv_stride, entry.splits, entry.split_stride, at);
  }
  return list;
}

// Merges query heads g0 .. g0 + kHeads of one KV head. `list` is the finished first list, `tail(list, at)` appends to a
// later one what comes from elsewhere. Loads are never skipped: past the end they repeat the last one, with weight 0, so
// that all of a round are in flight together.
template <int kD, int kHeads, typename PartT, typename OutT, typename Tail>
GRANIKV_DEVICE void merge_heads(const MergeParams<PartT, OutT>& p, int group, int kv_head, int g0, int lane, PartList list,
                                const Tail& tail) {
  constexpr int kPer = kD / 32, kAhead = 16 / kHeads;
  const int total = list.count, top_head = min(kHeads, p.gqa - g0) - 1;
  const size_t first = static_cast<size_t>(group) * p.q_heads + kv_head * p.gqa + g0;
  float acc[kHeads][kPer], top[kHeads], sum[kHeads], weight[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    top[h] = -INFINITY;
    sum[h] = 0.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) acc[h][i] = 0.0f;
    if (p.own_out != nullptr) {
      const float lse = p.own_lse[first + min(h, top_head)];
      if (lse > -INFINITY) {  // an empty tail's output is not read: it may be anything
        load_row<kPer>(p.own_out + (first + min(h, top_head)) * kD + lane * kPer, acc[h]);
        top[h] = lse;
        sum[h] = 1.0f;
      }
    }
  }
  for (int c0 = 0; c0 < total; c0 += 32) {
    if (c0 > 0) {
      list = list_items(p, group, kv_head, c0 + lane);
      tail(list, c0 + lane);
    }
    const int count = min(32, total - c0);
    float v[kAhead][kHeads][kPer];
    const auto ask = [&](int j0) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int row = __shfl_sync(0xffffffff, list.row, min(j0 + j, count - 1)) + g0;
#pragma unroll
        for (int h = 0; h < kHeads; ++h)
          load_row<kPer>(p.part_out + static_cast<size_t>(row + min(h, top_head)) * kD + lane * kPer, v[j][h]);
      }
    };
    float lse[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
      lse[h] = list.row >= 0 ? __ldcg(p.part_lse + list.row + g0 + min(h, top_head)) : -INFINITY;
    ask(0);  // before the weights are known
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float peak = lse[h];
#pragma unroll
      for (int d = 16; d > 0; d /= 2) peak = fmaxf(peak, __shfl_xor_sync(0xffffffff, peak, d));
      const float next = fmaxf(top[h], peak);
      const float base = next == -INFINITY ? 0.0f : next;
      const float keep = __expf(top[h] - base);
      weight[h] = __expf(lse[h] - base);
      float mass = weight[h];
#pragma unroll
      for (int d = 16; d > 0; d /= 2) mass += __shfl_xor_sync(0xffffffff, mass, d);
      sum[h] = sum[h] * keep + mass;
      top[h] = next;
#pragma unroll
      for (int i = 0; i < kPer; ++i) acc[h][i] *= keep;
    }
    for (int j0 = 0; j0 < count; j0 += kAhead) {
      if (j0 > 0) ask(j0);
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const float held = __shfl_sync(0xffffffff, weight[h], min(j0 + j, count - 1));
          const float w = j0 + j < count ? held : 0.0f;
#pragma unroll
          for (int i = 0; i < kPer; ++i) acc[h][i] += w * v[j][h][i];
        }
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h > top_head) break;
    const float inv = sum[h] > 0.0f ? 1.0f / sum[h] : 0.0f;
    OutT* out = p.out + (first + h) * kD + lane * kPer;
    if constexpr (kPer == 4) {
      *reinterpret_cast<uint2*>(out) =
          make_uint2(pack2<OutT>(acc[h][0] * inv, acc[h][1] * inv), pack2<OutT>(acc[h][2] * inv, acc[h][3] * inv));
    } else {
      *reinterpret_cast<uint32_t*>(out) = pack2<OutT>(acc[h][0] * inv, acc[h][1] * inv);
    }
    if (p.out_lse != nullptr && lane == 0) p.out_lse[first + h] = sum[h] > 0.0f ? top[h] + logf(sum[h]) : -INFINITY;
  }
}

template <typename PartT, typename OutT, int kD>
__global__ __launch_bounds__(128) void merge_kernel(const __grid_constant__ MergeParams<PartT, OutT> p) {
  const int lane = threadIdx.x % 32;
  const int task = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (task >= p.groups * p.q_heads) return;
  const int group = task / p.q_heads, head = task - group * p.q_heads;
  const int kv_head = head / p.gqa;
  const PartList list = list_items(p, group, kv_head, lane);
  grid_dependency_wait();
  merge_heads<kD, 1>(p, group, kv_head, head - kv_head * p.gqa, lane, list, [](PartList&, int) {});
}

}  // namespace granikv
