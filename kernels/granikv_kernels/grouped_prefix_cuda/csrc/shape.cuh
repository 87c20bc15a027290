// Shapes and data of the prefix pass, and its producer.
#pragma once

#include "ptx.cuh"
#include "tail.cuh"

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

template <typename T_, typename PartT_, int kD_, int kWg_, int kN_, int kStages_, int kCluster_, int kCtasPerSm_,
          bool kQRegs_, int kTailRing_>
struct PrefixConfig {
  using T = T_;
  using PartT = PartT_;
  static constexpr int kD = kD_, kWg = kWg_, kN = kN_, kStages = kStages_, kCluster = kCluster_;
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr bool kQRegs = kQRegs_;         // Q in registers, not in shared memory
  static constexpr bool kTail = kTailRing_ > 0;   // the producer's warpgroup also does private tails
  using Tail = TailShape<kD, kTailRing_>;
  static constexpr int kM = 64 * kWg;
  static constexpr int kThreads = 128 * (kWg + 1);
  static constexpr int kPanels = kD / 64;              // 64 elements = one 128-byte swizzled row
  static constexpr int kTileBytes = kN * kD * 2;       // one K or V tile
  static constexpr int kQBytes = kQRegs ? 0 : kM * kD * 2;
  static constexpr int kBoxRows = kN / kCluster;
  static constexpr int kBarOffset = kQBytes + 2 * kStages * kTileBytes;
  static constexpr int kTailOffset = kBarOffset + 256;  // rows of a tail tile lie on their own size
  static constexpr int kSmem = kTail ? kTailOffset + Tail::kBytes : kTailOffset;
  // What ptxas hands out at launch, and how setmaxnreg deals it out again. The pool is what the launch took, not the whole
  // register file: a warpgroup that asks for more than is left in it waits for ever.
  static constexpr int kLaunchRegs = 65536 / (kThreads * kCtasPerSm) / 8 * 8;
  static constexpr int kProducerRegs = kTail ? (kQRegs ? 88 : 120) : kWg == 3 ? 32 : 40;
  static constexpr int kConsumerRegs =
      kWg == 1 ? (kCtasPerSm == 2 ? 208 : 240) : kWg == 2 ? (kTail ? (kQRegs ? 208 : 192) : 232) : 160;
  static_assert(kProducerRegs + kWg * kConsumerRegs <= (kWg + 1) * kLaunchRegs, "setmaxnreg would hang");
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

}  // namespace granikv
