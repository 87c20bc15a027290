// Private tails, done by warps that the prefix pass leaves idle: memory-bound work beside compute-bound work, in one launch.
//
// A tail is a row's tokens [coverage, seq_len), at the slots that req_to_token names. Tokens are taken 16 at a time (a
// **tile**), one KV head at a time. All tiles of the batch, row by row and head by head, form one line that is cut evenly
// over the tail warps of the grid, so the split needs no plan: lengths are read on the device and may change every step.
// Warp w's share of unit u (u = row * kv_heads + head) is a partial result with id w + u, unique since both only grow.
//
// Scores are taken transposed: S^T = K Q^T has tokens as its 16 rows and up to 8 query heads of the group as its columns,
// O^T = V^T P^T the head's elements as rows. So a lane's accumulator columns are the same two query heads throughout, and
// softmax statistics never leave their lanes until the end.
#pragma once

#include <type_traits>

#include "ptx.cuh"

namespace granikv {

struct TailParams {
  const void* k;               // [slots, kv_heads, D]
  const void* v;
  const int* req_to_token;
  const void* req_index;       // [rows], row of req_to_token
  const void* seq_lens;        // [rows]
  const int* coverage;         // [rows], tokens the prefix items already cover
  int2* meta;                  // [rows * kv_heads]: first partial id, number of partials
  long long req_stride;
  long long slot_stride;       // elements between slots of k and v
  int rows;                    // 0: no tails in this launch
  int kv_heads;
  int part_base;               // partial-output row of id 0, query head 0
  int wide;                    // req_index and seq_lens are int64
};

GRANIKV_DEVICE int load_index(const void* p, int i, int wide) {
  return wide ? static_cast<int>(static_cast<const long long*>(p)[i]) : static_cast<const int*>(p)[i];
}

GRANIKV_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}
GRANIKV_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}
GRANIKV_DEVICE uint32_t movmatrix_trans(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
template <typename T>
GRANIKV_DEVICE void mma_16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Shared memory of the tail warps: what every warp needs of every row, and each warp's ring of 16-row pieces (K or V).
template <int kD>
struct TailShape {
  static constexpr int kWarps = 3;
  static constexpr int kRing = 5;
  static constexpr int kMaxRows = 512;
  static constexpr int kPiece = 16 * kD * 2;
  static constexpr int kRingBytes = kWarps * kRing * kPiece;
  static constexpr int kBytes = kRingBytes + 3 * kMaxRows * 4;
};

struct TailRows {
  int* first_tile;  // in units of one KV head: the unit (row, head) starts at first_tile[row] * kv_heads + head * tiles
  int* begin;       // coverage
  int* length;
};

template <typename T, typename PartT, int kD>
struct TailWarp {
  using Shape = TailShape<kD>;
  static constexpr int kRing = Shape::kRing;
  static constexpr float kSlack = 8.0f;  // as in the prefix pass

  // A place on the line of tiles.
  struct Cursor {
    int row, head, tile, tiles;
  };

  const TailParams& t;
  const T* q;
  long long q_row_stride;
  PartT* part_out;
  float* part_lse;
  int gqa;
  float scale_log2;
  TailRows rows;
  uint32_t ring;
  int lane, worker, workers;

  __device__ __forceinline__ int tiles_of(int row) const { return (rows.length[row] + 15) / 16; }

  // Fills `rows`: all tail warps of the CTA together. Returns the number of tiles of one KV head.
  __device__ __forceinline__ int read_rows(int local_warp) {
    for (int r = local_warp * 32 + lane; r < t.rows; r += 32 * Shape::kWarps) {
      const int begin = t.coverage[r];
      rows.begin[r] = begin;
      rows.length[r] = max(load_index(t.seq_lens, r, t.wide) - begin, 0);
    }
    bar_sync(8, 32 * Shape::kWarps);
    int total = 0;
    for (int r0 = 0; r0 < t.rows; r0 += 32) {  // every warp scans all rows: no second barrier
      const int mine = r0 + lane < t.rows ? tiles_of(r0 + lane) : 0;
      int sum = mine;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int up = __shfl_up_sync(0xffffffff, sum, d);
        if (lane >= d) sum += up;
      }
      if (r0 + lane < t.rows) rows.first_tile[r0 + lane] = total + sum - mine;
      total += __shfl_sync(0xffffffff, sum, 31);
    }
    __syncwarp();
    return total;
  }

  // Every unit's partials are described once: by the arithmetic all warps share, no message needed.
  __device__ __forceinline__ void write_meta(int share) {
    for (int u = worker * 32 + lane; u < t.rows * t.kv_heads; u += workers * 32) {
      const int row = u / t.kv_heads, head = u - row * t.kv_heads;
      const int tiles = tiles_of(row);
      const int first = rows.first_tile[row] * t.kv_heads + head * tiles;
      const int w0 = share ? first / share : 0;
      t.meta[u] = make_int2(w0 + u, tiles ? (first + tiles - 1) / share - w0 + 1 : 0);
    }
  }

  __device__ __forceinline__ Cursor locate(int at) const {
    int lo = 0, hi = t.rows - 1;  // the last row that starts at or before `at` and is not empty
    while (lo < hi) {
      const int mid = (lo + hi + 1) / 2;
      if (rows.first_tile[mid] * t.kv_heads <= at) {
        lo = mid;
      } else {
        hi = mid - 1;
      }
    }
    const int tiles = tiles_of(lo), left = at - rows.first_tile[lo] * t.kv_heads;
    return {lo, left / tiles, left % tiles, tiles};
  }
  __device__ __forceinline__ void advance(Cursor& c) const {
    if (++c.tile < c.tiles) return;
    c.tile = 0;
    if (++c.head < t.kv_heads) return;
    c.head = 0;
    do {
      ++c.row;
    } while (c.row < t.rows && rows.length[c.row] == 0);
    c.tiles = c.row < t.rows ? tiles_of(c.row) : 1;
  }

  // Slot of this lane's token (lane % 16) of a tile; past the end, the last token again: finite and unused.
  __device__ __forceinline__ int slot_at(const Cursor& c) const {
    const int token = rows.begin[c.row] + min(c.tile * 16 + lane % 16, rows.length[c.row] - 1);
    return __ldg(t.req_to_token + load_index(t.req_index, c.row, t.wide) * t.req_stride + token);
  }

  __device__ __forceinline__ void fetch(const void* cache, int slots, int head, int piece) const {
    constexpr int kChunks = kD / 8;          // 16-byte chunks of a row
    constexpr int kRows = 32 / kChunks;      // rows the warp covers at a time
    const int chunk = lane % kChunks;
    const uint32_t base = ring + (piece % kRing) * Shape::kPiece;
#pragma unroll
    for (int i = 0; i < 16 / kRows; ++i) {
      const int r = i * kRows + lane / kChunks;
      const int slot = __shfl_sync(0xffffffff, slots, r);
      const T* src = static_cast<const T*>(cache) + slot * t.slot_stride + head * kD + chunk * 8;
      cp_async_16(base + r * kD * 2 + ((chunk ^ (r % 8)) << 4), src);
    }
  }

  __device__ __forceinline__ void run(int local_warp) {
    const int per_head = read_rows(local_warp);
    const int total = per_head * t.kv_heads;
    const int share = (total + workers - 1) / workers;
    write_meta(share);
    const int first = worker * share, last = min(first + share, total);
    if (first >= last) return;

    Cursor ahead = locate(first), here = ahead;
    int slots[3];  // of the next tiles to be fetched, so that a slot's load is long done when it is used
    int heads[3];
    int asked = first;
    const auto ask = [&](int i) {
      heads[i] = ahead.head;
      slots[i] = asked < last ? slot_at(ahead) : 0;
      if (asked < last) advance(ahead);
      ++asked;
    };
#pragma unroll
    for (int i = 0; i < 3; ++i) ask(i);
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // two tiles in flight before the loop
      if (first + i < last) fetch(t.k, slots[i], heads[i], 2 * i);
      cp_async_commit();
      if (first + i < last) fetch(t.v, slots[i], heads[i], 2 * i + 1);
      cp_async_commit();
    }
    slots[0] = slots[2];
    heads[0] = heads[2];

    uint32_t qf[kD / 8];
    float o[kD / 16][4];
    float top[2], sum[2];
    bool fresh = true;
#pragma unroll 1
    for (int at = first, piece = 0; at < last; ++at, piece += 2) {
      ask(1);  // the tile after the one fetched below
      if (fresh) {
        load_q(here, qf);
#pragma unroll
        for (int i = 0; i < kD / 16; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
        top[0] = top[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
      }
      const bool more = at + 2 < last;
      if (more) fetch(t.k, slots[0], heads[0], piece + 4);
      cp_async_commit();
      cp_async_wait<4>();
      __syncwarp();
      float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      scores(piece, qf, s);
      __syncwarp();
      uint32_t p[2];
      softmax(rows.length[here.row] - here.tile * 16, s, p, o, top, sum);
      if (more) fetch(t.v, slots[0], heads[0], piece + 5);
      cp_async_commit();
      cp_async_wait<4>();
      __syncwarp();
      values(piece + 1, p, o);
      __syncwarp();
      slots[0] = slots[1];
      heads[0] = heads[1];
      fresh = here.tile + 1 == here.tiles || at + 1 == last;
      if (fresh) store(here, o, top, sum);
      advance(here);
    }
  }

  // B operand of K Q^T: column n = lane / 4 is a query head.
  __device__ __forceinline__ void load_q(const Cursor& c, uint32_t (&qf)[kD / 8]) const {
    const int g = lane / 4;
    const T* src = q + c.row * q_row_stride + (c.head * gqa + g) * kD + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kD / 8; ++i) qf[i] = g < gqa ? __ldg(reinterpret_cast<const uint32_t*>(src + 8 * i)) : 0u;
  }

  __device__ __forceinline__ void scores(int piece, const uint32_t (&qf)[kD / 8], float (&s)[4]) const {
    const int r = lane % 16;
    const uint32_t base = ring + (piece % kRing) * Shape::kPiece + r * kD * 2;
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      uint32_t a[4];
      ldmatrix_x4(a, base + (((2 * i + lane / 16) ^ (r % 8)) << 4));
      mma_16816<T>(s, a, qf[2 * i], qf[2 * i + 1]);
    }
  }

  __device__ __forceinline__ void values(int piece, const uint32_t (&p)[2], float (&o)[kD / 16][4]) const {
    const int r = lane % 8 + lane / 16 * 8;
    const uint32_t base = ring + (piece % kRing) * Shape::kPiece + r * kD * 2;
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      uint32_t a[4];
      ldmatrix_x4_trans(a, base + (((2 * i + lane / 8 % 2) ^ (r % 8)) << 4));
      mma_16816<T>(o[i], a, p[0], p[1]);
    }
  }

  // s: tokens lane / 4 and lane / 4 + 8, query heads 2 (lane % 4) and the next.
  __device__ __forceinline__ void softmax(int valid, float (&s)[4], uint32_t (&p)[2], float (&o)[kD / 16][4],
                                          float (&top)[2], float (&sum)[2]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] = lane / 4 + e / 2 * 8 < valid ? s[e] * scale_log2 : -INFINITY;
    float peak[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
    if (__any_sync(0xffffffff, peak[0] > top[0] + kSlack || peak[1] > top[1] + kSlack)) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int d = 4; d < 32; d *= 2) peak[c] = fmaxf(peak[c], __shfl_xor_sync(0xffffffff, peak[c], d));
        const float next = fmaxf(top[c], peak[c]);
        const float keep = exp2_fast(top[c] - next);
        top[c] = next;
        sum[c] *= keep;
#pragma unroll
        for (int i = 0; i < kD / 16; ++i) {
          o[i][c] *= keep;
          o[i][c + 2] *= keep;
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[e] = exp2_fast(s[e] - top[e % 2]);
      sum[e % 2] += s[e];
    }
    p[0] = movmatrix_trans(pack2<T>(s[0], s[1]));
    p[1] = movmatrix_trans(pack2<T>(s[2], s[3]));
  }

  __device__ __forceinline__ void store(const Cursor& c, const float (&o)[kD / 16][4], const float (&top)[2],
                                        float (&sum)[2]) const {
    const int id = worker + c.row * t.kv_heads + c.head;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) sum[e] += __shfl_xor_sync(0xffffffff, sum[e], d);
      const int g = 2 * (lane % 4) + e;
      if (g >= gqa) continue;
      const float inv = 1.0f / sum[e];
      const size_t at = static_cast<size_t>(t.part_base) + static_cast<size_t>(id) * gqa + g;
      PartT* out = part_out + at * kD + lane / 4;
#pragma unroll
      for (int i = 0; i < kD / 16; ++i) {
        out[16 * i] = static_cast<PartT>(o[i][e] * inv);
        out[16 * i + 8] = static_cast<PartT>(o[i][e + 2] * inv);
      }
      if (lane / 4 == 0) part_lse[at] = (top[e] + __log2f(sum[e])) * 0.69314718055994531f;
    }
  }
};

}  // namespace granikv
