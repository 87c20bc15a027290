// C entry points. Every function returns 0, a CUDA error, or a negative number of our own.
#include <cstring>

#include "merge.cuh"
#include "prefix.cuh"
#include "variants.inc"  // GRANIKV_VARIANTS(X): X(id, head_dim, warpgroups, tile_n, stages, cluster, ctas_per_sm, q_in_regs, tail_ring)

namespace granikv {
namespace {

constexpr int kUnknownVariant = -1;
constexpr int kNoDriver = -2;
constexpr int kMapRefused = -1000;

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

struct LaunchArgs {
  const CUtensorMap *kmap, *vmap;
  const void *q, *units, *unit_rows;
  void *part_out, *part_lse;
  long long q_row_stride;
  int gqa, max_rounds, grid;
  float scale_log2;
  const TailParams* tail;
  const void *offsets, *entries;
  void *out, *out_lse, *arrivals;
  int q_heads;
  cudaStream_t stream;
};

template <typename C>
int launch_prefix(const LaunchArgs& a) {
  const auto kernel = prefix_kernel<C>;
  // Not at the first launch: that may be under capture, and the attribute is the current device's, not the process's.
  if (a.grid == 0) return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSmem);
  PrefixParams<typename C::PartT> p{a.q,
                                    static_cast<const Unit*>(a.units),
                                    static_cast<const int*>(a.unit_rows),
                                    static_cast<typename C::PartT*>(a.part_out),
                                    static_cast<float*>(a.part_lse),
                                    a.q_row_stride,
                                    a.gqa,
                                    a.max_rounds,
                                    a.scale_log2};
  FusedParams<typename C::T, typename C::PartT> fused{};
  if (C::kTail && a.tail != nullptr) {
    fused.tail = *a.tail;
    fused.merge = {p.part_out,
                   p.part_lse,
                   static_cast<const int*>(a.offsets),
                   static_cast<const MergeEntry*>(a.entries),
                   nullptr,
                   nullptr,
                   static_cast<typename C::T*>(a.out),
                   static_cast<float*>(a.out_lse),
                   a.tail->rows,
                   a.q_heads,
                   a.gqa};
    fused.arrivals = static_cast<unsigned long long*>(a.arrivals);
  }
  cudaLaunchAttribute attr[2];
  int attrs = 0;
  if (C::kCluster > 1) {
    attr[attrs].id = cudaLaunchAttributeClusterDimension;
    attr[attrs++].val.clusterDim = {C::kCluster, 1, 1};
  }
  if (fused.tail.rows > 0) {  // its CTAs wait for each other
    attr[attrs].id = cudaLaunchAttributeCooperative;
    attr[attrs++].val.cooperative = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(a.grid);
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = C::kSmem;
  config.stream = a.stream;
  config.attrs = attr;
  config.numAttrs = attrs;
  return cudaLaunchKernelEx(&config, kernel, *a.kmap, *a.vmap, p, fused);
}

template <typename PartT, typename OutT, int kD>
int launch_merge(const MergeParams<PartT, OutT>& p, bool overlap, cudaStream_t stream) {
  if (p.groups == 0) {  // loads the kernel
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, merge_kernel<PartT, OutT, kD>);
  }
  cudaLaunchAttribute attr[1];
  attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attr[0].val.programmaticStreamSerializationAllowed = overlap ? 1 : 0;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3((p.groups * p.q_heads + 3) / 4);
  config.blockDim = dim3(128);
  config.stream = stream;
  config.attrs = attr;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, merge_kernel<PartT, OutT, kD>, p);
}

}  // namespace
}  // namespace granikv

using namespace granikv;

extern "C" {

const char* granikv_error(int code) {
  if (code == kUnknownVariant) return "no such kernel variant was compiled";
  if (code == kNoDriver) return "the CUDA driver has no cuTensorMapEncodeTiled (driver older than 12.0?)";
  if (code <= kMapRefused) return "cuTensorMapEncodeTiled refused the K or V cache (alignment or stride)";
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}

// A map over [slots, kv_heads, head_dim] with rows `slot_bytes` apart; one load takes box_rows slots x 64 elements.
int granikv_make_map(void* out, const void* base, long long slots, int kv_heads, int head_dim, long long slot_bytes,
                     int box_rows, int half) {
  static EncodeTiled encode = nullptr;
  if (encode == nullptr) {
    cudaDriverEntryPointQueryResult found;
    void* fn = nullptr;
    const cudaError_t err = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000, cudaEnableDefault, &found);
    if (err != cudaSuccess || found != cudaDriverEntryPointSuccess) return kNoDriver;
    encode = reinterpret_cast<EncodeTiled>(fn);
  }
  const cuuint64_t dims[3] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(kv_heads),
                              static_cast<cuuint64_t>(slots)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(head_dim) * 2, static_cast<cuuint64_t>(slot_bytes)};
  const cuuint32_t box[3] = {64, 1, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult res =
      encode(&map, half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(base),
             dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (res != CUDA_SUCCESS) return kMapRefused - static_cast<int>(res);
  std::memcpy(out, &map, sizeof(map));
  return 0;
}

// grid == 0 prepares the kernel on the current device instead of launching it; likewise granikv_merge with groups == 0.
int granikv_prefix(int variant, int half, int part_half, const void* kmap, const void* vmap, const void* q,
                   const void* units, const void* unit_rows, void* part_out, void* part_lse, long long q_row_stride,
                   int gqa, int max_rounds, int grid, float scale_log2, const TailParams* tail, const void* offsets,
                   const void* entries, void* out, void* out_lse, void* arrivals, int q_heads, void* stream) {
  LaunchArgs a{static_cast<const CUtensorMap*>(kmap),
               static_cast<const CUtensorMap*>(vmap),
               q,
               units,
               unit_rows,
               part_out,
               part_lse,
               q_row_stride,
               gqa,
               max_rounds,
               grid,
               scale_log2,
               tail,
               offsets,
               entries,
               out,
               out_lse,
               arrivals,
               q_heads,
               static_cast<cudaStream_t>(stream)};
#define GRANIKV_CASE(ID, ...)                                                                              \
  if (variant == ID) {                                                                                     \
    if constexpr (ID < GRANIKV_FULL) {                                                                     \
      if (half)                                                                                            \
        return part_half ? launch_prefix<PrefixConfig<__half, __half, __VA_ARGS__>>(a)                     \
                         : launch_prefix<PrefixConfig<__half, float, __VA_ARGS__>>(a);                     \
    }                                                                                                      \
    if (half) return kUnknownVariant;                                                                      \
    return part_half ? launch_prefix<PrefixConfig<__nv_bfloat16, __nv_bfloat16, __VA_ARGS__>>(a)           \
                     : launch_prefix<PrefixConfig<__nv_bfloat16, float, __VA_ARGS__>>(a);                  \
  }
  GRANIKV_VARIANTS(GRANIKV_CASE)
#undef GRANIKV_CASE
  return kUnknownVariant;
}

int granikv_merge(int head_dim, int half, int part_half, const void* part_out, const void* part_lse,
                  const void* offsets, const void* entries, const void* own_out, const void* own_lse, void* out,
                  void* out_lse, int groups, int q_heads, int gqa, int overlap, void* stream) {
  const auto go = [&](auto part, auto result, auto dim) -> int {
    using PartT = decltype(part);
    using OutT = decltype(result);
    const MergeParams<PartT, OutT> p{static_cast<const PartT*>(part_out),
                                     static_cast<const float*>(part_lse),
                                     static_cast<const int*>(offsets),
                                     static_cast<const MergeEntry*>(entries),
                                     static_cast<const OutT*>(own_out),
                                     static_cast<const float*>(own_lse),
                                     static_cast<OutT*>(out),
                                     static_cast<float*>(out_lse),
                                     groups,
                                     q_heads,
                                     gqa};
    return launch_merge<PartT, OutT, decltype(dim)::value>(p, overlap != 0, static_cast<cudaStream_t>(stream));
  };
  const auto by_dim = [&](auto part, auto result) -> int {
    if (head_dim == 128) return go(part, result, std::integral_constant<int, 128>{});
    if (head_dim == 64) return go(part, result, std::integral_constant<int, 64>{});
    return kUnknownVariant;
  };
  if (half) return part_half ? by_dim(__half{}, __half{}) : by_dim(float{}, __half{});
  return part_half ? by_dim(__nv_bfloat16{}, __nv_bfloat16{}) : by_dim(float{}, __nv_bfloat16{});
}

#ifdef GRANIKV_TRACE_ON
int granikv_read_trace(void* out, int ctas) { return cudaMemcpyFromSymbol(out, g_trace, sizeof(long long) * 16 * ctas); }
#endif

}  // extern "C"
