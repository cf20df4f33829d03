"""The C++ of the native kernel, compiled by `native` for one dtype and one pair of dims.

One call attends every row's new tokens, in groups of a few, over all stretches of their keys: work items are (unit, KV
head), a unit being some or all of one group's stretches. Each item gives (max, sum, weighted values); where a group has
several units, its last item of a head merges them in order, so results do not depend on which thread came when. K and V
are read once, in fp32 arithmetic, for all queries of a group and KV head. Portable vector extensions, no headers of
torch.

Imports: nothing.
"""

from __future__ import annotations

SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
static inline int thread_number() { return omp_get_thread_num(); }
#else
static inline int thread_number() { return 0; }
#endif

#if SCALAR == 0
typedef float scalar;
#elif SCALAR == 1
typedef uint16_t scalar;  // bfloat16
#else
typedef _Float16 scalar;
#endif

// As many tokens at once as there are vector registers for their sums.
#if defined(__AVX512F__)
constexpr int LANES = 16, TOKENS = 16, SUMS = 24;
#elif defined(__AVX2__)
constexpr int LANES = 8, TOKENS = 8, SUMS = 12;
#else
constexpr int LANES = 4, TOKENS = 8, SUMS = 24;
#endif
typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

constexpr int CHUNK = 128;  // tokens whose scores are held at once; native.CHUNK_TOKENS
constexpr int AHEAD = 4096;  // bytes; processors do not look ahead beyond a page
// Queries that share one reading of K, or of V: their sums stay in registers.
constexpr int ROOM_V = SUMS * LANES / V_DIM, MOST_K = 4, MOST_V = ROOM_V > 4 ? 4 : ROOM_V > 1 ? ROOM_V : 1;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// LANES numbers as fp32.
static inline vec load(const float* from) { return *(const vec*)from; }
#if SCALAR == 1
typedef uint16_t half __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
static inline vec load(const scalar* from) {
#if defined(__AVX512F__)
  return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#else
  const uvec bits = __builtin_convertvector(*(const half*)from, uvec) << 16;
  vec x;
  memcpy(&x, &bits, sizeof x);
  return x;
#endif
}
#elif SCALAR == 2
#if defined(__AVX512F__)
static inline vec load(const scalar* from) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
#elif defined(__AVX2__) && defined(__F16C__)
static inline vec load(const scalar* from) { return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
#else
static inline vec load(const scalar* from) {
  vec x;
  for (int i = 0; i < LANES; i++) x[i] = (float)from[i];
  return x;
}
#endif
#endif
static inline void store(float* to, vec x) { *(vec*)to = x; }
static inline vec all(float x) { return vec{} + x; }

static inline float sum_of(vec x) {
  float sum = 0;
  for (int i = 0; i < LANES; i++) sum += x[i];
  return sum;
}

// exp for x <= 0, within 2 units of the last place; 0 below -87.
static inline vec exp_of(vec x) {
  const vec safe = x < all(-87.0f) ? all(-87.0f) : x;
  const vec shift = all(12582912.0f);  // adding 1.5 * 2^23 rounds to an integer, found in the low bits
  const vec shifted = safe * 1.44269504088896341f + shift;
  ivec n;
  memcpy(&n, &shifted, sizeof n);
  const vec whole = shifted - shift;
  const vec f = (safe - whole * 0.693359375f) + whole * 2.12194440e-4f;
  vec p = f * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  const ivec bits = (n - 0x4B400000 + 127) << 23;
  vec power;
  memcpy(&power, &bits, sizeof power);
  return x < all(-87.0f) ? vec{} : p * power;
}

// The sums of TOKENS vectors, stored side by side.
static inline void store_sums(float* to, vec* a) {
#if defined(__AVX512F__)
// Half of each lane's partners come by choosing lanes where they are, half by moving them: fewer moves than taking x
// and y apart would need. Lane t of the result is the sum of a[t].
#define FOLD(x, y, stay, move) (__builtin_shufflevector(x, y, stay) + __builtin_shufflevector(x, y, move))
#define STAY8 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31
#define MOVE8 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23
#define STAY4 0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31
#define MOVE4 4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27
#define STAY2 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31
#define MOVE2 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29
#define STAY1 0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31
#define MOVE1 1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) a[i] = FOLD(a[i], a[i + 8], STAY8, MOVE8);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) a[i] = FOLD(a[i], a[i + 4], STAY4, MOVE4);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) a[i] = FOLD(a[i], a[i + 2], STAY2, MOVE2);
  store(to, FOLD(a[0], a[1], STAY1, MOVE1));
#else
  for (int t = 0; t < TOKENS; t++) to[t] = sum_of(a[t]);
#endif
}

// Row by row, so that what is asked for is never more than a processor keeps in flight. Any address may be asked for.
template <int BYTES>
static inline void ask_ahead(const void* from) {
#pragma GCC unroll 32
  for (int byte = 0; byte < BYTES; byte += 64) __builtin_prefetch((const char*)from + AHEAD + byte);
}

// s[i][t] = q[i] . k[t] for N queries and at most TOKENS keys. Keys are read one after the other: memory that is read
// in any other order comes at half the speed.
template <int N, bool ASK, typename T>
static inline void scores_of(const float* q, const T* k, int n, float* s) {
  vec a[N][TOKENS];
  for (int t = 0; t < n; t++) {
    if (ASK) ask_ahead<K_DIM * sizeof(T)>(k + t * K_DIM);
    vec sum[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) sum[i] = vec{};
#pragma GCC unroll 8
    for (int d = 0; d < K_DIM; d += LANES) {
      const vec x = load(k + t * K_DIM + d);
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) sum[i] += x * load(q + i * K_DIM + d);
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) a[i][t] = sum[i];
  }
  for (int t = n; t < TOKENS; t++)
    for (int i = 0; i < N; i++) a[i][t] = vec{};
  for (int i = 0; i < N; i++) store_sums(s + i * CHUNK, a[i]);
}

// n rows as fp32, for queries that take more than one reading.
template <int DIM>
static inline const float* widened(const scalar* rows, int n, float* tile) {
  for (int t = 0; t < n; t++) {
    ask_ahead<DIM * sizeof(scalar)>(rows + t * DIM);
#pragma GCC unroll 64
    for (int d = 0; d < DIM; d += LANES) store(tile + t * DIM + d, load(rows + t * DIM + d));
  }
  return tile;
}

template <bool ASK, typename T>
static inline void scores_of_all(const float* q, int queries, const T* k, int n, float* s) {
  switch (queries < MOST_K ? queries : MOST_K) {
    case 1: scores_of<1, ASK>(q, k, n, s); break;
    case 2: scores_of<2, ASK>(q, k, n, s); break;
    case 3: scores_of<3, ASK>(q, k, n, s); break;
    default: scores_of<MOST_K, ASK>(q, k, n, s);
  }
  if (queries > MOST_K) scores_of_all<false>(q + MOST_K * K_DIM, queries - MOST_K, k, n, s + MOST_K * CHUNK);
}

// s[i][t] = q[i] . k[t]
static void all_scores(const float* q, int queries, const scalar* k, int n, float* s) {
  alignas(64) float tile[TOKENS * K_DIM];
  for (int t = 0; t < n; t += TOKENS, k += TOKENS * K_DIM) {
    const int tokens = n - t < TOKENS ? n - t : TOKENS;
    if (SCALAR == 0 || queries <= MOST_K)
      scores_of_all<true>(q, queries, k, tokens, s + t);
    else
      scores_of_all<false>(q, queries, widened<K_DIM>(k, tokens, tile), tokens, s + t);
  }
}

// acc[i] += sum over t of p[i][t] * v[t] for N queries and at most TOKENS keys.
template <int N, bool ASK, typename T>
static inline void values_of(const float* p, const T* v, int n, float* acc) {
  vec a[N][V_DIM / LANES];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++)
#pragma GCC unroll 64
    for (int d = 0; d < V_DIM / LANES; d++) a[i][d] = load(acc + i * V_DIM + d * LANES);
  for (int t = 0; t < n; t++) {
    if (ASK) ask_ahead<V_DIM * sizeof(T)>(v + t * V_DIM);
#pragma GCC unroll 64
    for (int d = 0; d < V_DIM / LANES; d++) {
      const vec x = load(v + t * V_DIM + d * LANES);
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) a[i][d] += p[i * CHUNK + t] * x;
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < N; i++)
#pragma GCC unroll 64
    for (int d = 0; d < V_DIM / LANES; d++) store(acc + i * V_DIM + d * LANES, a[i][d]);
}

template <bool ASK, typename T>
static inline void values_of_all(const float* p, int queries, const T* v, int n, float* acc) {
  switch (queries < MOST_V ? queries : MOST_V) {
    case 1: values_of<1, ASK>(p, v, n, acc); break;
    case 2: values_of<2, ASK>(p, v, n, acc); break;
    case 3: values_of<3, ASK>(p, v, n, acc); break;
    default: values_of<MOST_V, ASK>(p, v, n, acc);
  }
  if (queries > MOST_V) values_of_all<false>(p + MOST_V * CHUNK, queries - MOST_V, v, n, acc + MOST_V * V_DIM);
}

// acc[i] += sum over t of p[i][t] * v[t]
static void add_values(const float* p, int queries, const scalar* v, int n, float* acc) {
  alignas(64) float tile[TOKENS * V_DIM];
  for (int t = 0; t < n; t += TOKENS, v += TOKENS * V_DIM) {
    const int tokens = n - t < TOKENS ? n - t : TOKENS;
    if (SCALAR == 0 || queries <= MOST_V)
      values_of_all<true>(p + t, queries, v, tokens, acc);
    else
      values_of_all<false>(p + t, queries, widened<V_DIM>(v, tokens, tile), tokens, acc);
  }
}

// One chunk of a stretch, folded into (top, total, acc).
static void fold_chunk(const float* q, int queries, const scalar* k, const scalar* v, int n, int fresh, int64_t behind,
                       float* s, float* top, float* total, float* acc) {
  all_scores(q, queries, k, n, s);
  for (int i = 0; i < queries; i++) {
    float* row = s + i * CHUNK;
    // Of `fresh` causal new tokens, query i is number i % fresh; `behind` keys of the group come after the chunk.
    const int64_t seen = n + behind - (fresh ? fresh - 1 - i % fresh : 0);
    const int64_t first_hidden = seen < 0 ? 0 : seen < n ? seen : n;
    for (int64_t t = first_hidden; t < (n + LANES - 1) / LANES * LANES; t++) row[t] = NOTHING;
    vec high = all(top[i]);
    for (int t = 0; t < n; t += LANES) {
      const vec x = load(row + t);
      high = x > high ? x : high;
    }
    float most = top[i];
    for (int l = 0; l < LANES; l++) most = high[l] > most ? high[l] : most;
    if (most == NOTHING) {
      memset(row, 0, n * sizeof(float));
      continue;
    }
    vec sum{};
    for (int t = 0; t < n; t += LANES) {
      const vec x = exp_of(load(row + t) - most);
      store(row + t, x);
      sum += x;
    }
    const float keep = std::exp(top[i] - most);
    top[i] = most;
    total[i] = total[i] * keep + sum_of(sum);
    for (int d = 0; d < V_DIM; d++) acc[i * V_DIM + d] *= keep;
  }
  add_values(s, queries, v, n, acc);
}

// A number of floats after which another thread's may begin.
static inline int64_t apart(int64_t floats) { return (floats + 31) / 32 * 32; }

// Where a call's numbers lie, in the order in which `native` writes them.
struct Plan {
  int64_t groups, units, items, most_queries, new_tokens;
  const int64_t *group_units;     // [groups + 1] first unit of each group
  const int64_t *unit_stretches;  // [units + 1] first stretch of each unit
  const int64_t *unit_groups;     // [units]
  const int64_t *keys;            // [groups] keys that a group's last token sees
  const int64_t *row, *first, *tokens;  // [groups] its new tokens: row of q, the first of them, how many
  const int64_t *slots;           // [groups] where the items of a group of several units lie
  const int64_t *stretches;       // [stretches][4] pool, offset in it, tokens, keys of the group before it

  explicit Plan(const int64_t* from) {
    groups = from[0], units = from[1], items = from[2], most_queries = from[3], new_tokens = from[4];
    group_units = from + 5;
    unit_stretches = group_units + groups + 1;
    unit_groups = unit_stretches + units + 1;
    keys = unit_groups + units;
    row = keys + groups, first = row + groups, tokens = first + groups;
    slots = tokens + groups;
    stretches = slots + groups;
  }
};

// Merge the items of one group and KV head, in order; none gives 0 and -inf. Query i is head i / tokens of the KV
// head's, token i % tokens of the group's; out is [rows, new, heads, V_DIM], lse [rows, heads, new].
static void merge_items(const Plan& plan, int64_t g, int64_t h, int64_t kv_heads, int64_t group, const float* items,
                        int64_t count, float* out, float* lse) {
  const int64_t step = kv_heads * plan.most_queries * (2 + V_DIM), heads = kv_heads * group, tokens = plan.tokens[g];
  const int64_t queries = group * tokens;
  for (int64_t i = 0; i < queries; i++) {
    const int64_t head = h * group + i / tokens, token = plan.first[g] + i % tokens;
    float top = NOTHING, total = 0;
    float* to = out + ((plan.row[g] * plan.new_tokens + token) * heads + head) * V_DIM;
    memset(to, 0, V_DIM * sizeof(float));
    for (int64_t n = 0; n < count; n++) top = std::fmax(top, items[n * step + i]);
    for (int64_t n = 0; n < count && top != NOTHING; n++) {
      const float* item = items + n * step;
      const float weight = std::exp(item[i] - top);
      total += weight * item[queries + i];
      for (int d = 0; d < V_DIM; d++) to[d] += weight * item[2 * queries + i * V_DIM + d];
    }
    const float scale = total > 0 || total != total ? 1 / total : 0;
    for (int d = 0; d < V_DIM; d++) to[d] *= scale;
    lse[(plan.row[g] * heads + head) * plan.new_tokens + token] = top + std::log(total);
  }
}

// places: strides of q from row to row, from head to head, from token to token; then for each pool the addresses of K
// and V and their strides from head to head. numbers: see Plan.
// scratch: groups * kv_heads counters, then the items of groups of several units, then for each thread queries, scores
// and the item at hand; what one thread works on lies in no cache line of another's.
extern "C" void tieredkv_attend(const scalar* q, const int64_t* places, float* out, float* lse, float* scratch,
                                const int64_t* numbers, int64_t kv_heads, int64_t group, int64_t causal, float scale,
                                int64_t threads) {
  const Plan plan(numbers);
  const int64_t* pools = places + 3;
  int* done = (int*)scratch;
  float* items = scratch + plan.groups * kv_heads;
  const int64_t size = plan.most_queries * (2 + V_DIM), own = apart(plan.most_queries * (K_DIM + CHUNK) + size);
  float* workspaces = scratch + apart(plan.groups * kv_heads + plan.items * kv_heads * size);
  memset(done, 0, plan.groups * kv_heads * sizeof(int));
  for (int64_t g = 0; g < plan.groups; g++)
    for (int64_t h = 0; h < kv_heads && plan.group_units[g] == plan.group_units[g + 1]; h++)
      merge_items(plan, g, h, kv_heads, group, items, 0, out, lse);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t x = 0; x < plan.units * kv_heads; x++) {
    const int64_t u = x / kv_heads, h = x % kv_heads, g = plan.unit_groups[u];
    const int tokens = (int)plan.tokens[g], queries = (int)group * tokens;
    float* mine = workspaces + own * thread_number();
    float* s = mine + plan.most_queries * K_DIM;
    for (int i = 0; i < queries; i++) {
      const scalar* from = q + plan.row[g] * places[0] + (h * group + i / tokens) * places[1] +
                           (plan.first[g] + i % tokens) * places[2];
      for (int d = 0; d < K_DIM; d += LANES) store(mine + i * K_DIM + d, scale * load(from + d));
    }
    const int64_t units = plan.group_units[g + 1] - plan.group_units[g];
    float *top = s + plan.most_queries * CHUNK, *total = top + queries, *acc = total + queries;
    for (int i = 0; i < queries; i++) top[i] = NOTHING;
    memset(total, 0, queries * (1 + V_DIM) * sizeof(float));
    for (int64_t j = plan.unit_stretches[u]; j < plan.unit_stretches[u + 1]; j++) {
      const int64_t* stretch = plan.stretches + 4 * j;
      const int64_t *pool = pools + 4 * stretch[0], offset = stretch[1], length = stretch[2];
      const scalar* k = (const scalar*)pool[0] + h * pool[2] + offset * K_DIM;
      const scalar* v = (const scalar*)pool[1] + h * pool[3] + offset * V_DIM;
      for (int64_t t = 0; t < length; t += CHUNK) {
        const int n = (int)(length - t < CHUNK ? length - t : CHUNK);
        const int64_t behind = plan.keys[g] - stretch[3] - t - n;
        fold_chunk(mine, queries, k + t * K_DIM, v + t * V_DIM, n, causal ? tokens : 0, behind, s, top, total, acc);
      }
    }
    if (units == 1) {
      merge_items(plan, g, h, kv_heads, group, top, 1, out, lse);
      continue;
    }
    float* first = items + (plan.slots[g] * kv_heads + h) * size;
    memcpy(first + (u - plan.group_units[g]) * kv_heads * size, top, queries * (2 + V_DIM) * sizeof(float));
    // The release of each item's results and the acquisition by whoever comes last.
    if (__atomic_add_fetch(done + g * kv_heads + h, 1, __ATOMIC_ACQ_REL) == units)
      merge_items(plan, g, h, kv_heads, group, first, units, out, lse);
  }
}
"""
