// Paged attention on sm_90a's tensor cores for rows with two or more queries: as prefill.cu, for block sizes
// that are multiples of 8.

#include "attention/attention.cuh"
#include "generated/sm90_prefill.cuh"
#include "prefill/sm90_prefill_codes.cuh"
#include "prefill/sm90_prefill_consumer.cuh"
#include "prefill/sm90_prefill_epilogue.cuh"
#include "prefill/sm90_prefill_producer.cuh"

// Warps of the group that does not multiply.
constexpr int SCHEDULER_WARP = 0;
constexpr int KEY_WARP = 1;
constexpr int VALUE_WARP = 2;

// Where a tile of queries is that does not exist.
constexpr int NONE = -1;

// The barriers of the rings, and those by which the groups take turns to multiply.
struct ConsumerBarriers {
  Barrier* full_k;   // [STAGES]
  Barrier* full_v;   // [STAGES]
  Barrier* empty_k;  // [STAGES]
  Barrier* empty_v;  // [STAGES]
  int turn;
  int next_turn;
};

// A warp group's rows of all tiles of queries of a block.
template <bool IN_ORDER, bool SINKS, bool CAPPED, typename T, typename Operand, typename Cached, int HEAD_DIM,
          int CONSUMERS, int STAGES, bool CODES>
__device__ __forceinline__ void attend(PrefillConsumer<T, Operand, HEAD_DIM, CONSUMERS, STAGES, CODES>& own,
                                       PrefillEpilogue<T, Cached, HEAD_DIM, CONSUMERS>& epilogue,
                                       TileQueue& queue, const ConsumerBarriers& barriers,
                                       const QueryRows<HEAD_DIM>& rows, const T* q, int sliding_window,
                                       float scale_log2, float plain_cap_scale) {
  Softmax softmax;
  softmax.clear();
  VisibleKeys visible;
  visible.sliding_window = sliding_window;
  visible.lane = epilogue.lane;
  auto release = [&](Barrier* empty) {
    if (arrives_for_warp(epilogue.lane)) barrier_arrive(empty);
  };

  // Scores are of keys as the cache has them: those of e4m3 have a scale for each head, and with CODES
  // queries have one for each row.
  float cap_scale = plain_cap_scale;
  auto scale_scores = [&](const AnnouncedTile& tile, int buffer) {
    if constexpr (!IS_E4M3<Cached>) return;
    const float key_scale = epilogue.cache_scales.key(tile.kv_head);
    if constexpr (CAPPED) cap_scale = plain_cap_scale * key_scale;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (!CAPPED) epilogue.scales_log2[h] = scale_log2 * key_scale;
      if constexpr (CODES) epilogue.scales_log2[h] *= own.query_scales[buffer][epilogue.lane_row0 + h * 8];
    }
  };

  // While the last scores of a tile of queries are computed, its successor's queries are fetched.
  int slot, next_slot, buffer = 0;
  auto prepare_next = [&] {
    next_slot = queue.take_slot();
    if (uniform(queue.tiles[next_slot].kv_head) < 0) {
      next_slot = NONE;
    } else {
      own.load_queries(q, queue.tiles[next_slot], rows, buffer ^ 1);
    }
  };

  slot = queue.take_slot();
  wait_for_earlier_kernels();
  let_next_kernel_start();  // attention of rows with one query, which needs no more than this has waited for
  if (uniform(queue.tiles[slot].kv_head) < 0) return;
  own.load_queries(q, queue.tiles[slot], rows, buffer);
  visible.begin_tile(queue.tiles[slot], rows, epilogue.lane_row0);
  own.convert_queries(buffer);
  own.synchronize_group();
  scale_scores(queue.tiles[slot], buffer);
  barrier_wait(&barriers.full_k[0], 0);
  pin(own.scores);
  wgmma_fence();
  own.multiply_keys(buffer, 0);
  visible.next_tile();
  wgmma_wait<0>();
  pin(own.scores);
  release(&barriers.empty_k[0]);
  if (visible.tiles_left == 0) prepare_next();
  if constexpr (CAPPED) cap_scores(own.scores, cap_scale);
  visible.mask(own.scores);
  softmax.renew<IN_ORDER>(own.scores, epilogue.scales_log2);
  softmax.weigh(own.scores, epilogue.scales_log2);
  own.round_weights();

  // Each turn multiplies one tile's weights by its values and computes the weights of the next one, which may
  // be the first of the next tile of queries.
  int step = 0;
  bool adds = false;  // the weights in hand are not those of a tile of queries' first tile of keys
  while (true) {
    const int stage = step % STAGES, next_stage = (step + 1) % STAGES;
    if (visible.num_values < TILE_KEYS) {
      barrier_wait(&barriers.full_v[stage], step / STAGES % 2);
      own.clear_values(stage, visible.num_values);
      visible.num_values = TILE_KEYS;
    }
    const bool is_last = visible.tiles_left == 0;
    if (is_last) {
      if (next_slot == NONE) break;
      own.convert_queries(buffer ^ 1);
      own.synchronize_group();
      buffer ^= 1;
    }

    barrier_wait(&barriers.full_k[next_stage], (step + 1) / STAGES % 2);
    named_barrier_wait(barriers.turn, 2 * WARPGROUP_SIZE);
    own.pin_registers();
    wgmma_fence();
    own.multiply_keys(buffer, next_stage);
    barrier_wait(&barriers.full_v[stage], step / STAGES % 2);
    wgmma_fence();
    own.multiply_values(stage, adds);
    named_barrier_arrive(barriers.next_turn, 2 * WARPGROUP_SIZE);

    const int finished_slot = slot;
    if (is_last) {
      slot = next_slot;
      visible.begin_tile(queue.tiles[slot], rows, epilogue.lane_row0);
      epilogue.template finish<SINKS>(queue.tiles[finished_slot], softmax);
      softmax.clear();
      scale_scores(queue.tiles[slot], buffer);
    }
    visible.next_tile();
    if (visible.tiles_left == 0) prepare_next();

    wgmma_wait<1>();
    pin(own.scores);
    release(&barriers.empty_k[next_stage]);
    if constexpr (CAPPED) cap_scores(own.scores, cap_scale);
    visible.mask(own.scores);
    softmax.renew<IN_ORDER>(own.scores, epilogue.scales_log2);
    softmax.weigh(own.scores, epilogue.scales_log2);
    softmax.complete();
    wgmma_wait<0>();
    pin(own.outputs);
    pin(own.weights);
    release(&barriers.empty_v[stage]);
    own.round_weights();
    if (is_last) {
      epilogue.store(queue.tiles[finished_slot], own.outputs);
      queue.free_slot(finished_slot);
    } else {
      own.rescale_outputs(softmax);
    }
    adds = !is_last;
    ++step;
  }

  barrier_wait(&barriers.full_v[step % STAGES], step / STAGES % 2);
  own.multiply_last_values(step % STAGES, adds);
  epilogue.template finish<SINKS>(queue.tiles[slot], softmax);
  if (uniform(queue.tiles[slot].num_splits) > 1 &&
      !epilogue.template merge_splits<SINKS>(queue.tiles[slot], own.outputs, softmax))
    return;
  epilogue.store(queue.tiles[slot], own.outputs);
  queue.free_slot(slot);
}

// out = softmax over the visible keys of (q . k * scale), times v, for rows with two or more queries, in one
// pass over the keys (FlashAttention-3, Shah et al. 2024). Weights are rounded to T before they
// meet v; over e4m3 queries and weights are __half. CODES, of e4m3: queries are rounded to e4m3 with a scale
// for each row, its largest magnitude / 448, and meet the codes of the keys.
//   in:  key_map, value_map: maps of groups of eight rows of
//        [num_blocks * num_kv_heads * block_size, HEAD_DIM] T, of CODES' keys of e4m3, with boxes of
//        `piece` = gcd(block_size, 128) rows; else of e4m3 maps of what `widen_cache_kernel` has widened, in
//        boxes of TILE_KEYS rows
//        key_cache, value_cache: those caches, or e4m3 with kv_scales [2, num_kv_heads] float or null
//        first_tiles: of e4m3 [num_seqs] int as of `widen_cache_kernel`, or null: no row has been widened
//        q [num_tokens, num_heads * HEAD_DIM] T
//        block_tables [tables, block_table_width] int
//        table_rows [num_seqs] int
//        cu_seqlens_q [num_seqs + 1] int
//        context_lens [num_seqs] int
//        sinks [num_heads] T, with SINKS: exp(sinks[h]) is added to the sum that head h's softmax divides by
//        scale_log2 = scale * log2(e), positive, or CAPPED cap * log2(e) with cap_scale = scale / cap, for
//        scores cap * tanh(q . k * scale / cap)
//   out: out [num_tokens, num_heads * HEAD_DIM] T
//        partial_out [blocks, 64 * CONSUMERS * HEAD_DIM] float, where splits leave their results
//        partial_sums [blocks, 64 * CONSUMERS, 2] float
//        arrivals [blocks * CONSUMERS] unsigned, 0 before and after
// Only q, the caches and what has been widened of them may be written by a kernel of the same graph that may
// not have ended.
// Layout: row-major, q, out and partials 16-byte aligned; num_heads = group * num_kv_heads; block_size a
// multiple of 8. The group's heads of consecutive tokens are the consecutive rows of a tile, so that they
// share its keys.
// Grid: at most as many blocks as run at a time; they take tiles of 64 * CONSUMERS rows until none is left,
// of `heads_at_once` key/value heads, then of the next; later tiles first, since they see more keys. Where
// there are so few tiles that each may have several blocks, its keys are split (prefill_units.cuh).
// Block: 128 * (CONSUMERS + 1) threads. Shared memory: 4 * (64 * CONSUMERS + 128 * STAGES) * HEAD_DIM + 1024
// bytes, of e4m3 256 * HEAD_DIM more, CODES 128 * STAGES * HEAD_DIM less.
// Unit of work: a warp group holds 64 rows of a tile; of one more group a warp chooses tiles, one copies keys
// and one values, or of e4m3 the three others copy and widen both, with CODES two of them the values alone.
// The groups take turns to multiply, so that one multiplies while another one computes weights; and a group
// multiplies the weights of a tile of keys while it computes those of the next. Tiles of keys are taken from
// the last to the first and begin at multiples of TILE_KEYS, so while keys are not split a query's result
// depends on its own row alone, and not on how its prompt was cut into chunks. Splits change its last bits,
// as sums are added up in another order: with a row's length, what else is in the step and the number of
// blocks, but not from one run to the next. Rows (or windows) of less than 2 * MIN_SPLIT_TILES * TILE_KEYS
// keys are never split. IN_ORDER: no keys are split, and tiles of keys outside of a query's window, which
// depend on the queries beside it, change nothing.
template <typename T, typename Cached, int HEAD_DIM, int CONSUMERS, int STAGES, bool IN_ORDER, bool SINKS,
          bool CAPPED, bool CODES>
__global__ void __launch_bounds__(WARPGROUP_SIZE*(CONSUMERS + 1), 1)
    sm90_paged_attention_prefill_kernel(SM90_PAGED_ATTENTION_PREFILL_PARAMS(T, Cached)) {
  using Layout = PrefillLayout<HEAD_DIM, CONSUMERS, STAGES, CODES>;
  using Codes = CodeProducer<HEAD_DIM, STAGES, CODES>;
  constexpr int VALUE_FILLERS = IS_E4M3<Cached> ? Codes::WIDENERS * WARP_ARRIVALS : 1;
  constexpr int KEY_FILLERS = CODES ? 1 : VALUE_FILLERS;
  constexpr int PRODUCERS = IS_E4M3<Cached> ? WARPS - 1 : 2;  // that take tiles of queries
  static_assert(sizeof(T) == 2, "tensor-core attention takes bfloat16 or float16");
  static_assert(!CODES || IS_E4M3<Cached> && !CAPPED, "a soft cap is not scaled by rows");
  static_assert(CONSUMERS == 2 || CONSUMERS == 3, "two or three groups share the registers");
  // Together no more than the block has from its launch.
  constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;
  constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;

  extern __shared__ __align__(128) unsigned char unaligned_memory[];
  unsigned char* const tiles_q =
      unaligned_memory + (-shared_address(unaligned_memory) & (SWIZZLE_REPEAT - 1));
  unsigned char* const tiles_k = tiles_q + 2 * CONSUMERS * Layout::QUERY_BYTES;
  unsigned char* const tiles_v = tiles_k + STAGES * Layout::KEY_BYTES;
  __shared__ Barrier full_k[STAGES], full_v[STAGES], empty_k[STAGES], empty_v[STAGES];
  __shared__ Barrier announced[SLOTS], freed[SLOTS];
  __shared__ AnnouncedTile tiles[SLOTS];
  __shared__ bool merges[CONSUMERS];
  __shared__ float query_scales[2][Layout::TILE_ROWS];  // with CODES

  const int warp = uniform(threadIdx.x / WARP_SIZE);
  const int lane = threadIdx.x % WARP_SIZE;
  const int group = num_heads / num_kv_heads;

  TileQueue queue{announced, freed, tiles};
  if (threadIdx.x == 0) {
    if (!IS_E4M3<Cached> || CODES || first_tiles != nullptr) prefetch_map(key_map);
    if (!IS_E4M3<Cached> || first_tiles != nullptr) prefetch_map(value_map);
    init_barriers<CONSUMERS, STAGES>(KEY_FILLERS, VALUE_FILLERS, PRODUCERS, full_k, full_v, empty_k, empty_v,
                                     queue);
  }
  __syncthreads();

  if (warp < WARPS) {
    give_registers<PRODUCER_REGISTERS>();

    if (warp == SCHEDULER_WARP) {
      TileScheduler scheduler{
          {cu_seqlens_q, context_lens, num_seqs, group, Layout::TILE_ROWS, sliding_window},
          num_kv_heads,
          heads_at_once};
      scheduler.run<IN_ORDER>(queue, lane);
      return;
    }
    const CachedRows cached{block_tables, table_rows, block_table_width, num_kv_heads, block_size, piece};
    if constexpr (IS_E4M3<Cached>) {
      if (CODES && warp == KEY_WARP) {
        const KeyProducer<HEAD_DIM, STAGES> producer{key_map, tiles_k, full_k, empty_k, cached};
        producer.run(queue, lane);
        return;
      }
      unsigned char* const staged = tiles_v + STAGES * Layout::VALUE_BYTES;
      const CodedRing keys{key_cache, tiles_k, full_k, empty_k, &key_map};
      const CodedRing values{value_cache, tiles_v, full_v, empty_v, &value_map};
      const Codes producer{{CODES ? values : keys, values},  cached, first_tiles, staged,
                           warp - (WARPS - Codes::WIDENERS), lane};
      producer.run(queue);
    } else if (warp == KEY_WARP || warp == VALUE_WARP) {
      const bool is_key = warp == KEY_WARP;
      const KeyProducer<HEAD_DIM * 2, STAGES> producer{is_key ? key_map : value_map,
                                                       is_key ? tiles_k : tiles_v, is_key ? full_k : full_v,
                                                       is_key ? empty_k : empty_v, cached};
      producer.run(queue, lane);
    }
    return;
  }

  take_registers<CONSUMER_REGISTERS>();
  const int consumer = warp / WARPS - 1;
  const int thread = threadIdx.x % WARPGROUP_SIZE;
  const int lane_row0 = consumer * GROUP_ROWS + warp % WARPS * 16 + lane / 4;  // the other row is 8 further
  const QueryRows<HEAD_DIM> rows{num_heads, group};
  using Operand = OperandOf<T, Cached>;
  PrefillConsumer<T, Operand, HEAD_DIM, CONSUMERS, STAGES, CODES> own(consumer, tiles_q, tiles_k, tiles_v,
                                                                      query_scales);
  PrefillEpilogue<T, Cached, HEAD_DIM, CONSUMERS> epilogue{rows,
                                                           out,
                                                           partial_out,
                                                           partial_sums,
                                                           arrivals,
                                                           &merges[consumer],
                                                           {scale_log2, scale_log2},
                                                           consumer,
                                                           thread,
                                                           lane,
                                                           lane_row0,
                                                           sinks,
                                                           {kv_scales, num_kv_heads}};
  const ConsumerBarriers barriers{
      full_k, full_v, empty_k, empty_v, TURN_BARRIER + consumer, TURN_BARRIER + (consumer + 1) % CONSUMERS};
  if (consumer == CONSUMERS - 1) named_barrier_arrive(TURN_BARRIER, 2 * WARPGROUP_SIZE);
  attend<IN_ORDER, SINKS, CAPPED>(own, epilogue, queue, barriers, rows, q, sliding_window, scale_log2,
                                  cap_scale);
}
