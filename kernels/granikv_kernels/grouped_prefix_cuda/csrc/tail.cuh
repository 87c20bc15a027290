// Private tails beside the prefix pass, in one launch: memory-bound work beside compute-bound work.
//
// A tail is a row's tokens [coverage, seq_len), at the slots that req_to_token names. Tokens are taken 16 at a time (a
// **tile**), one KV head at a time. All tiles of the batch, row by row and head by head, form one line that is cut evenly
// over the tail warps of the grid: lengths are read on the device, so the cut needs no plan and may change every step.
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
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Shared memory of the tail warps: what every warp needs of every row, and each warp's ring of tiles (16 rows of K, 16 of V).
template <int kD, int kRing_>
struct TailShape {
  static constexpr int kWarps = 3;
  static constexpr int kRing = kRing_;
  static constexpr int kMaxRows = 384;
  static constexpr int kHalf = 16 * kD * 2;
  static constexpr int kRingBytes = kWarps * kRing * 2 * kHalf;
  static constexpr int kBytes = kRingBytes + 4 * kMaxRows * 4;
};

struct TailRows {
  int* first_tile;  // of one KV head: the unit (row, head) starts at first_tile[row] * kv_heads + head * tiles(row)
  int* begin;       // coverage
  int* length;
  int* request;     // row of req_to_token

  __device__ __forceinline__ int tiles(int row) const { return (length[row] + 15) / 16; }
};

// Tiles a tail warp takes; `total` on the line.
GRANIKV_DEVICE int tail_total(const TailRows& rows, int n_rows, int kv_heads) {
  return (rows.first_tile[n_rows - 1] + rows.tiles(n_rows - 1)) * kv_heads;
}
GRANIKV_DEVICE int tail_share(int total, int workers) { return (total + workers - 1) / workers; }

// First partial id and number of partials of a unit.
GRANIKV_DEVICE int2 tail_partials(const TailRows& rows, int row, int head, int kv_heads, int share) {
  const int tiles = rows.tiles(row);
  if (tiles == 0) return make_int2(0, 0);
  const int first = rows.first_tile[row] * kv_heads + head * tiles;
  const int w0 = first / share;
  return make_int2(w0 + row * kv_heads + head, (first + tiles - 1) / share - w0 + 1);
}

template <typename T, typename PartT, int kD, int kRing>
struct TailWarp {
  using Shape = TailShape<kD, kRing>;
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

  // Fills `rows`: all tail warps of the CTA together.
  __device__ __forceinline__ void read_rows(int local_warp) {
    for (int r = local_warp * 32 + lane; r < t.rows; r += 32 * Shape::kWarps) {
      const int begin = t.coverage[r], end = load_index(t.seq_lens, r, t.wide);
      rows.request[r] = load_index(t.req_index, r, t.wide);
      rows.begin[r] = begin;
      rows.length[r] = max(end - begin, 0);
    }
    bar_sync(8, 32 * Shape::kWarps);
    int total = 0;
    for (int r0 = 0; r0 < t.rows; r0 += 32) {  // every warp scans all rows: no second barrier
      const int mine = r0 + lane < t.rows ? rows.tiles(r0 + lane) : 0;
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
  }

  __device__ __forceinline__ Cursor locate(int at) const {
    int lo = 0, hi = t.rows - 1;  // the last row that starts at or before `at`: no empty one
    while (lo < hi) {
      const int mid = (lo + hi + 1) / 2;
      if (rows.first_tile[mid] * t.kv_heads <= at) {
        lo = mid;
      } else {
        hi = mid - 1;
      }
    }
    const int tiles = rows.tiles(lo), past = at - rows.first_tile[lo] * t.kv_heads;
    return {lo, past / tiles, past % tiles, tiles};
  }
  __device__ __forceinline__ void advance(Cursor& c) const {
    if (++c.tile < c.tiles) return;
    c.tile = 0;
    if (++c.head < t.kv_heads) return;
    c.head = 0;
    do {
      ++c.row;
    } while (c.row < t.rows && rows.length[c.row] == 0);
    c.tiles = c.row < t.rows ? rows.tiles(c.row) : 1;
  }

  // Slot of this lane's token (lane % 16) of a tile; past the end, the last token again: finite and unused.
  __device__ __forceinline__ int slot_at(const Cursor& c) const {
    const int token = rows.begin[c.row] + min(c.tile * 16 + lane % 16, rows.length[c.row] - 1);
    return __ldg(t.req_to_token + rows.request[c.row] * t.req_stride + token);
  }

  __device__ __forceinline__ void fetch(int slots, int head, uint32_t tile) const {
    constexpr int kChunks = kD / 8;          // 16-byte chunks of a row
    constexpr int kRows = 32 / kChunks;      // rows the warp covers at a time
    const int chunk = lane % kChunks;
    // The swizzle (16-byte chunk ^ row % 8) splits into a lane's part and a part known at compile time.
    const uint32_t base = tile + lane / kChunks * kD * 2 + ((chunk ^ (lane / kChunks)) << 4);
    const T* k = static_cast<const T*>(t.k) + head * kD + chunk * 8;
    const T* v = static_cast<const T*>(t.v) + head * kD + chunk * 8;
#pragma unroll
    for (int i = 0; i < 16 / kRows; ++i) {
      const long long at = __shfl_sync(0xffffffff, slots, i * kRows + lane / kChunks) * t.slot_stride;
      const uint32_t dst = (base ^ ((i * kRows % 8) << 4)) + i * kRows * kD * 2;
      cp_async_16(dst, k + at);
      cp_async_16(dst + Shape::kHalf, v + at);
    }
  }

  __device__ __forceinline__ void run() {
    const int total = tail_total(rows, t.rows, t.kv_heads), share = tail_share(total, workers);
    const int first = worker * share, count = min(share, total - first);
    if (count <= 0) return;
    Cursor asked = locate(first), here = asked;
    int known = 0;
    // Slots of tiles to come are asked for one step before they are used: their load is done by then.
    const auto ask = [&](int& slots, int& head) {
      if (known >= count) return;
      head = asked.head;
      slots = slot_at(asked);
      ++known;
      advance(asked);
    };
    int slots[kRing], heads[kRing];
#pragma unroll
    for (int i = 0; i < kRing; ++i) {
      slots[i] = heads[i] = 0;
      ask(slots[i], heads[i]);
    }
#pragma unroll
    for (int i = 0; i < kRing - 1; ++i) {  // in flight
      if (i < count) fetch(slots[i], heads[i], ring + i * 2 * Shape::kHalf);
      cp_async_commit();
    }
    int next_slots = slots[kRing - 1], next_head = heads[kRing - 1];

    uint32_t qf[kD / 8];
    float o[kD / 16][4];
    float top[2], sum[2];
    bool fresh = true;
    uint32_t tile = ring, last = ring + (kRing - 1) * 2 * Shape::kHalf;  // of this step, and of the step before it
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int now_slots = next_slots, now_head = next_head;
      ask(next_slots, next_head);
      if (fresh) {
        load_q(here, qf);
#pragma unroll
        for (int j = 0; j < kD / 16; ++j) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.0f;
        top[0] = top[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
      }
      if (i + kRing - 1 < count) fetch(now_slots, now_head, last);
      cp_async_commit();
      cp_async_wait<kRing - 1>();
      __syncwarp();
      float s[4];
      uint32_t p[2];
      scores(tile, qf, s);
      softmax(rows.length[here.row] - here.tile * 16, s, p, o, top, sum);
      values(tile + Shape::kHalf, p, o);
      __syncwarp();
      fresh = here.tile + 1 == here.tiles || i + 1 == count;
      if (fresh) store(here, o, top, sum);
      advance(here);
      last = tile;
      tile += 2 * Shape::kHalf;
      if (tile == ring + kRing * 2 * Shape::kHalf) tile = ring;
    }
  }

  // B operand of K Q^T: column n = lane / 4 is a query head.
  __device__ __forceinline__ void load_q(const Cursor& c, uint32_t (&qf)[kD / 8]) const {
    const int g = lane / 4;
    const T* src = q + c.row * q_row_stride + (c.head * gqa + g) * kD + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kD / 8; ++i) qf[i] = g < gqa ? __ldg(reinterpret_cast<const uint32_t*>(src + 8 * i)) : 0u;
  }

  // Four chains: a matrix instruction waits its turn behind the prefix pass's, so a chain of eight would be the bottleneck.
  __device__ __forceinline__ void scores(uint32_t k, const uint32_t (&qf)[kD / 8], float (&s)[4]) const {
    const int r = lane % 16;
    const uint32_t base = k + r * kD * 2 + ((lane / 16 ^ r % 8) << 4);
    float part[4][4];
#pragma unroll
    for (int c = 0; c < 4; ++c) part[c][0] = part[c][1] = part[c][2] = part[c][3] = 0.0f;
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      uint32_t a[4];
      ldmatrix_x4(a, base ^ (i << 5));
      mma_16816<T>(part[i % 4], a, qf[2 * i], qf[2 * i + 1]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] = (part[0][e] + part[1][e]) + (part[2][e] + part[3][e]);
  }

  __device__ __forceinline__ void values(uint32_t v, const uint32_t (&p)[2], float (&o)[kD / 16][4]) const {
    const int r = lane % 8 + lane / 16 * 8;
    const uint32_t base = v + r * kD * 2 + ((lane / 8 % 2 ^ r % 8) << 4);
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      uint32_t a[4];
      ldmatrix_x4_trans(a, base ^ (i << 5));
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
