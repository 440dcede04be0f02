// Steps of SGD, Adam and AdamW over float32 weights and masters of 16-bit ones, full and split, and the encodings of
// states, in one pass over memory. And casts of many parameters, in one call.
//
// The operations of torch that the same step would run are the specification, to the bit: each rounding here is one of
// theirs, in their order. Built with -ffp-contract=off; where they multiply and add in one rounding, fused() does.
// ONE_ROUNDING: whether torch's kernels do so on this machine.

#include <Python.h>

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sqrt.h>
#include <c10/util/Half.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#ifdef __F16C__
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

constexpr int64_t BLOCK = 128, NEIGHBOURS = 32;
// Numbers worked on at a time: what is between two loops stays in a cache. Where torch is called for square roots, which
// takes as long as some hundred numbers do, they are more, of several weights where these are small.
constexpr int64_t CHUNK = 256, CHUNK_OF_ROOTS = 4096;
// The bytes of a line of a cache, and numbers that are fetched while as many are worked on.
constexpr int64_t LINE = 64, FETCHED = 1024;
// Numbers that are worth a thread.
constexpr int64_t GRAIN = 32768;
// Of a tensor's end, what does not fill so many places is done by other code of torch's fused steps.
constexpr int64_t LANES = 8;
constexpr uint32_t MAGNITUDE = 0x7FFFFFFF, INFINITE = 0x7F800000;

inline float number(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float fused(float a, float b, float c) {
  return ONE_ROUNDING ? __builtin_fmaf(a, b, c) : a * b + c;
}

// -- masters ----------------------------------------------------------------------------------------------------------

void join(const uint16_t* weight, const int16_t* remainder, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits = static_cast<uint32_t>(weight[i]) << 16, magnitude = bits & MAGNITUDE;
    int32_t rest = remainder[i];
    // A written 0 or inf over a remainder of other numbers counts alone.
    rest = (magnitude == 0) & (rest < 0) ? 0 : rest;
    rest = (magnitude == INFINITE) & (rest > 0) ? 0 : rest;
    out[i] = number(bits + static_cast<uint32_t>(rest));
  }
}

void split(const float* values, uint16_t* weight, int16_t* remainder, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits = bits_of(values[i]);
    bits = (bits & MAGNITUDE) > INFINITE ? 0x7FC00000u : bits;  // others, such as CUDA's, would be rounded to 0
    remainder[i] = static_cast<int16_t>(bits & 0xFFFF);
    weight[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
  }
}

inline uint16_t bfloat16_of(float value) {
  const uint32_t bits = bits_of(value), rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & MAGNITUDE) > INFINITE ? 0x7FC0u : rounded);
}

void round_to_bfloat16(const float* values, uint16_t* weight, int64_t n) {
  for (int64_t i = 0; i < n; ++i) weight[i] = bfloat16_of(values[i]);
}

void round_to_float16(const float* values, uint16_t* weight, int64_t n) {
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(weight + i),
        _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
  for (; i < n; ++i) weight[i] = c10::Half(values[i]).x;
}

// Whether the weights are the rounded values, bit for bit.
bool are_rounded(const float* values, const uint16_t* weight, bool is_float16, int64_t n) {
  int64_t i = 0;
  if (!is_float16) {
    uint16_t differ = 0;
    for (; i < n; ++i) differ |= bfloat16_of(values[i]) ^ weight[i];
    return differ == 0;
  }
#ifdef __F16C__
  __m128i differ = _mm_setzero_si128();
  for (; i + 8 <= n; i += 8) {
    const __m128i rounded =
        _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m128i has = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weight + i));
    differ = _mm_or_si128(differ, _mm_xor_si128(rounded, has));
  }
  if (!_mm_testz_si128(differ, differ)) return false;
#endif
  for (; i < n; ++i)
    if (c10::Half(values[i]).x != weight[i]) return false;
  return true;
}

// The law of full masters: where a weight is not the rounding of its master it was written to, and counts. See
// mpinit/masters/law.py.
void follow(float* values, const uint16_t* weight, bool is_float16, uint16_t* rounded, int64_t n) {
  if (are_rounded(values, weight, is_float16, n)) return;
  (is_float16 ? round_to_float16 : round_to_bfloat16)(values, rounded, n);
  const uint32_t infinite = is_float16 ? 0x7C00 : 0x7F80, largest = infinite - 1;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t has = weight[i], would = rounded[i], size = has & 0x7FFF, other = would & 0x7FFF;
    const bool is_clamped = is_float16 && size == largest && other == infinite && (has ^ would) < 0x8000 &&
        (bits_of(values[i]) & MAGNITUDE) < INFINITE;
    if (has == would || (size == 0 && other == 0) || (size > infinite && other > infinite) || is_clamped) continue;
    values[i] = is_float16 ? static_cast<float>(c10::Half(weight[i], c10::Half::from_bits())) : number(has << 16);
  }
}

// -- encoded states; see mpinit/masters/codecs ------------------------------------------------------------------------

constexpr uint32_t ROW = 0x85EBCA6Bu, STIR = 0x27D4EB2Fu;

inline int32_t factor_of(uint32_t sum, int64_t row) {
  return static_cast<int32_t>((sum + static_cast<uint32_t>(row) * ROW) * STIR) >> 12 | 1;
}

// In the lower 20 bits.
inline uint32_t noise(int32_t factor, int64_t place) {
  return static_cast<uint32_t>(place + 1) * static_cast<uint32_t>(factor);
}

constexpr uint32_t LEAST_BITS = 0x40000000, MARGIN = 64;
constexpr float LEAST = 2.f;

template <bool is_unsigned>
void decode_codes(const uint8_t* codes, float scale, float* out) {
  for (int64_t i = 0; i < BLOCK; ++i) {
    const uint32_t sign = is_unsigned ? 0 : static_cast<uint32_t>(-(codes[i] >> 7));
    const uint32_t kept = (codes[i] ^ sign) & 255;
    const float size = (number((kept << (is_unsigned ? 19 : 20)) + LEAST_BITS) - LEAST) * scale;
    out[i] = is_unsigned ? size : number((bits_of(size) & MAGNITUDE) | (sign & ~MAGNITUDE));
  }
}

void decode_row(const uint8_t* codes, float scale, float* out) {
  if (std::signbit(scale)) decode_codes<true>(codes, std::fabs(scale), out);
  else decode_codes<false>(codes, std::fabs(scale), out);
}

// The rows whose numbers decide about each other's noise: those of a group begin here, and the last goes to the end.
inline int64_t groups_in(int64_t rows) {
  return std::max<int64_t>(rows / NEIGHBOURS, 1);
}

inline int64_t end_of_group(int64_t group, int64_t rows) {
  return group + 1 == groups_in(rows) ? rows : (group + 1) * NEIGHBOURS;
}

template <bool is_unsigned>
void encode_numbers(const float* values, uint8_t* codes, float inverse, int32_t factor) {
  constexpr int cut_off = is_unsigned ? 19 : 20;
  for (int64_t i = 0; i < BLOCK; ++i) {
    const uint32_t bits = bits_of(values[i]), random = (noise(factor, i) & ((1u << cut_off) - 2 * MARGIN)) | MARGIN;
    const uint32_t kept = (bits_of(number(bits & MAGNITUDE) * inverse + LEAST) + random) >> cut_off;
    const uint8_t code = static_cast<uint8_t>(is_unsigned ? kept : kept ^ (0 - (bits >> 31)));
    codes[i] = is_unsigned && code == 0 && bits != 0 ? 1 : code;
  }
}

void encode_row(const float* values, uint8_t* codes, float* scale, int32_t factor) {
  uint32_t largest = 0, signs = 0;  // of sizes: as whole numbers they have the same order
  for (int64_t i = 0; i < BLOCK; ++i) {
    uint32_t bits = bits_of(values[i]), size = bits & MAGNITUDE;
    largest = size > largest ? size : largest;
    signs |= bits;
  }
  const bool is_unsigned = !(signs >> 31);
  const float top = is_unsigned ? 31 * 0x1p12f - LEAST : 15 * 0x1p13f - LEAST;
  float exact = number(largest) / top;
  const float tiny = std::numeric_limits<float>::min();
  exact = exact < tiny ? tiny : exact;
  if (!(bits_of(exact) < INFINITE)) {
    std::memset(codes, 255, BLOCK);
    *scale = is_unsigned ? -exact : exact;
    return;
  }
  const float cut = number((bits_of(exact) + 8u) & ~15u);
  (is_unsigned ? encode_numbers<true> : encode_numbers<false>)(values, codes, 1.f / cut, factor);
  *scale = is_unsigned ? -cut : cut;
}

uint32_t sum_of(const float* values, int64_t n) {
  uint32_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += bits_of(values[i]);
  return sum;
}

// Rows of one group, from the row `first` of their tensor on.
void encode_group(const float* values, uint8_t* codes, float* scales, int64_t first, int64_t rows) {
  const uint32_t sum = sum_of(values, rows * BLOCK);
  for (int64_t row = 0; row < rows; ++row)
    encode_row(values + row * BLOCK, codes + row * BLOCK, scales + row, factor_of(sum, first + row));
}

void round_group(const float* values, uint16_t* narrow, int64_t first, int64_t rows) {
  const uint32_t sum = sum_of(values, rows * BLOCK);
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t factor = factor_of(sum, first + row);
    for (int64_t i = 0; i < BLOCK; ++i) {
      const uint32_t bits = bits_of(values[row * BLOCK + i]), up = bits + (noise(factor, i) & 0xFFFF);
      narrow[row * BLOCK + i] = static_cast<uint16_t>(((bits & MAGNITUDE) > INFINITE ? 0x7FC00000u : up) >> 16);
    }
  }
}

// -- optimizers -------------------------------------------------------------------------------------------------------

struct State {
  float* values = nullptr;  // or, where it is encoded, bfloat16 numbers, or codes with scales:
  uint16_t* narrow = nullptr;
  uint8_t* codes = nullptr;
  float* scales = nullptr;
  bool is_encoded() const { return narrow != nullptr || codes != nullptr; }
};

struct Weight {
  // Float32 numbers: a full master's, or the weight's own, which has none; or none, and 16-bit ones with remainders.
  float* values;
  uint16_t* weight;
  int16_t* remainder;
  bool is_float16;
  const float* gradient;
  const uint16_t* short_gradient;
  int64_t size;
  State states[2];
  float* count;
  float step, root;  // Adam's: of the update's size, of the second moment's
  c10::TensorImpl *impl, *master;
};

struct Options {
  bool is_adam, is_fused, maximize, is_decoupled, nesterov;
  double rate, decay, momentum, dampening, beta1, beta2, eps;
};

void check_states(Weight& weight, const Options& o) {
  if (!o.is_adam) return;
  const double count = *weight.count + 1.f;
  const double first = 1 - std::pow(o.beta1, count), second = 1 - std::pow(o.beta2, count);
  weight.step = static_cast<float>(-(o.rate / first));
  weight.root = static_cast<float>(o.is_fused ? std::sqrt(second) : std::pow(second, 0.5));
}

// Negates gradients to maximize, and adds a weight decay that is not decoupled.
void prepare(const float* p, float* g, int64_t n, const Options& o) {
  if (o.maximize)
    for (int64_t i = 0; i < n; ++i) g[i] = -g[i];
  if (o.decay == 0 || o.is_decoupled) return;
  const float decay = static_cast<float>(o.decay);
  for (int64_t i = 0; i < n; ++i) g[i] = fused(p[i], decay, g[i]);
}

// The factor of a decoupled weight decay; 1 where the decay is in the gradient.
float decay_factor(const Options& o) {
  return o.is_decoupled ? static_cast<float>(1 - o.rate * o.decay) : 1.f;
}

void decay(float* p, int64_t n, const Options& o) {
  const float keep = decay_factor(o);
  if (o.decay == 0 || !o.is_decoupled) return;
  for (int64_t i = 0; i < n; ++i) p[i] *= keep;
}

void sgd(float* __restrict p, float* __restrict g, float* __restrict m, int64_t n, bool is_tail, const Options& o) {
  const float rate = static_cast<float>(-o.rate), momentum = static_cast<float>(o.momentum);
  const float damped = static_cast<float>(1 - o.dampening);
  if (m == nullptr) {
    for (int64_t i = 0; i < n; ++i) p[i] = fused(g[i], rate, p[i]);
    return;
  }
  if (is_tail)
    for (int64_t i = 0; i < n; ++i) m[i] = fused(m[i], momentum, g[i] * damped);
  else
    for (int64_t i = 0; i < n; ++i) m[i] = fused(g[i], damped, m[i] * momentum);
  if (o.nesterov)
    for (int64_t i = 0; i < n; ++i) p[i] = fused(fused(m[i], momentum, g[i]), rate, p[i]);
  else
    for (int64_t i = 0; i < n; ++i) p[i] = fused(m[i], rate, p[i]);
}

// A part of a weight whose moments are there, and whose update waits for square roots.
struct Waiting {
  const Weight* weight;
  const Options* options;
  int64_t begin, size, at;
  const float* first;
};

struct Scratch {  // lengths that are no powers of two: such arrays get into each other's way in a cache
  alignas(64) float p[CHUNK_OF_ROOTS + 144], g[CHUNK_OF_ROOTS + 144], root[CHUNK_OF_ROOTS + 144];
  alignas(64) uint16_t rounded[CHUNK_OF_ROOTS + 144];
  alignas(64) float decoded[2][2 * NEIGHBOURS * BLOCK + 144];
  at::Tensor roots = at::from_blob(root, {CHUNK_OF_ROOTS}, at::kFloat);
  std::vector<Waiting> waiting;
  int64_t filled = 0;
};

void moments(
    const float* __restrict g, float* __restrict m, float* __restrict v, int64_t n, bool is_tail, const Options& o) {
  const float first = static_cast<float>(1 - o.beta1), beta2 = static_cast<float>(o.beta2);
  const float second = static_cast<float>(1 - o.beta2);
  if (std::fabs(first) < 0.5f)
    for (int64_t i = 0; i < n; ++i) m[i] = fused(first, g[i] - m[i], m[i]);
  else
    for (int64_t i = 0; i < n; ++i) m[i] = fused(first - 1.f, g[i] - m[i], g[i]);
  if (is_tail)
    for (int64_t i = 0; i < n; ++i) v[i] = fused(v[i], beta2, second * g[i] * g[i]);
  else
    for (int64_t i = 0; i < n; ++i) v[i] = fused(second * g[i], g[i], v[i] * beta2);
}

// One loop for decay, moments, update and, with rounds, rounding: so reading memory overlaps with divisions. is_small: as
// in torch's lerp, the weight of the gradient is below 0.5. The last numbers of a tensor have other code in torch.
template <bool is_small, bool rounds>
void adam(
    float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v, int64_t n,
    [[maybe_unused]] uint16_t* __restrict rounded, const Weight& weight, const Options& o) {
  const float first = static_cast<float>(1 - o.beta1), beta2 = static_cast<float>(o.beta2);
  const float second = static_cast<float>(1 - o.beta2), factor = is_small ? first : first - 1.f;
  const float keep = decay_factor(o), step = weight.step, over = weight.root;
  const float eps = static_cast<float>(o.eps);
  for (int64_t i = 0; i < n; ++i) {
    const float mean = fused(factor, g[i] - m[i], is_small ? m[i] : g[i]);
    const float square = fused(second * g[i], g[i], v[i] * beta2);
    m[i] = mean;
    v[i] = square;
    const float now = p[i] * keep + step * mean / (std::sqrt(square) / over + eps);
    p[i] = now;
    if constexpr (rounds) rounded[i] = bfloat16_of(now);
  }
}

float* values_of(const Weight& weight, int64_t begin, float* scratch) {
  return weight.values == nullptr ? scratch : weight.values + begin;
}

void put_back(const Weight& weight, int64_t begin, const float* p, int64_t n) {
  if (weight.remainder != nullptr)
    split(p, weight.weight + begin, weight.remainder + begin, n);
  else if (weight.weight != nullptr)
    (weight.is_float16 ? round_to_float16 : round_to_bfloat16)(p, weight.weight + begin, n);
}

void update_waiting(Scratch& scratch) {
  const int64_t n = scratch.filled;
  if (n == 0) return;
  // torch's own square root is not the nearest number everywhere, and belongs to whichever library it was built with.
  (n == CHUNK_OF_ROOTS ? scratch.roots : at::from_blob(scratch.root, {n}, at::kFloat)).sqrt_();
  for (const Waiting& part : scratch.waiting) {
    const float step = part.weight->step, over = part.weight->root, eps = static_cast<float>(part.options->eps);
    float* __restrict p = values_of(*part.weight, part.begin, scratch.p + part.at);
    const float *m = part.first, *root = scratch.root + part.at;
    for (int64_t i = 0; i < part.size; ++i) p[i] = p[i] + step * m[i] / (root[i] / over + eps);
    put_back(*part.weight, part.begin, p, part.size);
  }
  scratch.waiting.clear();
  scratch.filled = 0;
}

struct Chunk {
  const Weight* weight;
  const Options* options;
  int64_t begin, size;
};

void step_part(const Chunk& chunk, int64_t begin, int64_t n, float* first, float* second, Scratch& scratch) {
  const Weight& weight = *chunk.weight;
  const Options& o = *chunk.options;
  const bool waits = o.is_adam && !o.is_fused;
  if (waits && scratch.filled + n > CHUNK_OF_ROOTS) update_waiting(scratch);
  const int64_t at = scratch.filled;
  float *p = values_of(weight, begin, scratch.p + at), *g = scratch.g;
  if (weight.remainder != nullptr) join(weight.weight + begin, weight.remainder + begin, p, n);
  else if (weight.weight != nullptr) follow(p, weight.weight + begin, weight.is_float16, scratch.rounded, n);
  if (weight.short_gradient != nullptr)
    for (int64_t i = 0; i < n; ++i) g[i] = number(static_cast<uint32_t>(weight.short_gradient[begin + i]) << 16);
  // Where nothing is added to a gradient it is read where it is: a copy of its own takes as long as all the rest.
  else if (o.maximize || (o.decay != 0 && !o.is_decoupled)) std::memcpy(g, weight.gradient + begin, n * sizeof(float));
  else g = const_cast<float*>(weight.gradient + begin);
  prepare(p, g, n, o);
  if (waits) {
    decay(p, n, o);
    moments(g, first, second, n, false, o);
    std::memcpy(scratch.root + at, second, n * sizeof(float));
    scratch.waiting.push_back({&weight, &o, begin, n, at, first});
    scratch.filled += n;
    return;
  }
  const int64_t body = o.is_fused ? n / LANES * LANES : n, rest = n - body;
  if (!o.is_adam) {
    decay(p, n, o);
    sgd(p, g, first, body, false, o);
    if (rest > 0) sgd(p + body, g + body, first == nullptr ? nullptr : first + body, rest, true, o);
  } else {
    const bool is_small = std::fabs(static_cast<float>(1 - o.beta1)) < 0.5f;
    const bool rounds = weight.remainder == nullptr && weight.weight != nullptr && !weight.is_float16;
    const auto update = rounds ? (is_small ? adam<true, true> : adam<false, true>)
                               : (is_small ? adam<true, false> : adam<false, false>);
    update(p, g, first, second, body, rounds ? weight.weight + begin : nullptr, weight, o);
    if (rest > 0) {
      float *__restrict q = p + body, *__restrict m = first + body, *__restrict v = second + body;
      decay(q, rest, o);
      moments(g + body, m, v, rest, true, o);
      const float step = weight.step, over = weight.root, eps = static_cast<float>(o.eps);
      for (int64_t i = 0; i < rest; ++i) q[i] = q[i] + step * m[i] / (std::sqrt(v[i]) / over + eps);
    }
    if (rounds) {
      put_back(weight, begin + body, p + body, rest);
      return;
    }
  }
  put_back(weight, begin, p, n);
}

void step_chunk(const Chunk& chunk, Scratch& scratch) {
  const Weight& weight = *chunk.weight;
  const int64_t row = chunk.begin / BLOCK, rows = (chunk.size + BLOCK - 1) / BLOCK, end = chunk.begin + chunk.size;
  const int64_t size = chunk.options->is_adam && !chunk.options->is_fused ? CHUNK_OF_ROOTS : CHUNK;
  for (int64_t begin = chunk.begin; begin < end; begin += size) {
    const int64_t n = std::min(size, end - begin);
    float* states[2] = {nullptr, nullptr};
    for (int which = 0; which < 2; ++which) {
      const State& state = weight.states[which];
      if (state.values != nullptr) states[which] = state.values + begin;
      if (!state.is_encoded()) continue;
      states[which] = scratch.decoded[which] + (begin - chunk.begin);
      if (state.narrow != nullptr)
        for (int64_t i = 0; i < n; ++i) states[which][i] = number(static_cast<uint32_t>(state.narrow[begin + i]) << 16);
      else for (int64_t from = 0; from < n; from += BLOCK)
        decode_row(state.codes + begin + from, state.scales[(begin + from) / BLOCK], states[which] + from);
    }
    step_part(chunk, begin, n, states[0], states[1], scratch);
  }
  if (weight.states[0].is_encoded() || weight.states[1].is_encoded()) update_waiting(scratch);
  for (int which = 0; which < 2; ++which) {
    const State& state = weight.states[which];
    if (!state.is_encoded()) continue;
    const float* values = scratch.decoded[which];
    std::fill(scratch.decoded[which] + chunk.size, scratch.decoded[which] + rows * BLOCK, 0.f);
    if (state.narrow != nullptr) round_group(values, state.narrow + row * BLOCK, row, rows);
    else encode_group(values, state.codes + row * BLOCK, state.scales + row, row, rows);
  }
}

struct Group {
  Options options;
  std::vector<Weight> weights;
};

std::vector<Chunk> chunks_of(const std::vector<Group>& groups) {
  std::vector<Chunk> chunks;
  for (const Group& group : groups)
    for (const Weight& w : group.weights) {
      const int64_t rows = (w.size + BLOCK - 1) / BLOCK, count = w.size == 0 ? 0 : groups_in(rows);
      for (int64_t which = 0; which < count; ++which) {
        const int64_t begin = which * NEIGHBOURS * BLOCK, end = std::min(end_of_group(which, rows) * BLOCK, w.size);
        chunks.push_back({&w, &group.options, begin, end - begin});
      }
    }
  return chunks;
}

void step_all(const std::vector<Chunk>& chunks, int64_t numbers) {
  const int64_t count = static_cast<int64_t>(chunks.size()), each = numbers / std::max<int64_t>(count, 1) + 1;
  at::parallel_for(0, count, std::max<int64_t>(GRAIN / each, 1), [&](int64_t from, int64_t to) {
    at::AutoDispatchBelowADInplaceOrView guard;
    Scratch scratch;
    for (int64_t i = from; i < to; ++i) step_chunk(chunks[i], scratch);
    update_waiting(scratch);
  });
}

// -- Python -----------------------------------------------------------------------------------------------------------

struct Object {
  PyObject* held;
  explicit Object(PyObject* made) : held(made) {}
  Object(const Object&) = delete;
  ~Object() { Py_XDECREF(held); }
};

// Names that are looked up for each weight, each made once.
PyObject* named(const char* name) {
  static std::vector<std::pair<const char*, PyObject*>> known;
  for (const auto& [text, made] : known)
    if (text == name) return made;
  known.emplace_back(name, PyUnicode_InternFromString(name));
  return known.back().second;
}

constexpr const char CODES[] = "codes", STRIDES[] = "strides", REMAINDER[] = "remainder", PARAMETER[] = "parameter",
                     CLAMPS[] = "clamps", STEP[] = "step", FIRST[] = "exp_avg", SECOND[] = "exp_avg_sq",
                     MOMENTUM[] = "momentum_buffer", ADDRESS[] = "address";

PyObject* attribute(PyObject* owner, const char* name) {
  PyObject* found = PyObject_GetAttr(owner, named(name));
  if (found == nullptr) PyErr_Clear();
  return found;
}

struct WithoutPython {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutPython() { PyEval_RestoreThread(state); }
};

bool is_plain(const at::Tensor& t, at::ScalarType dtype) {
  return t.defined() && t.device().is_cpu() && t.layout() == at::kStrided && t.scalar_type() == dtype &&
      !t.unsafeGetTensorImpl()->is_python_dispatch() && !t.is_inference() && !t.is_neg();
}

bool is_of_no_subclass(PyObject* item) {
  return Py_TYPE(item) == (PyTypeObject*)ParameterClass || THPVariable_CheckExact(item);
}

bool lies_like(const at::Tensor& t, const at::Tensor& other) {
  return t.sizes() == other.sizes() && t.strides() == other.strides();
}

// The entry of a state; whether it is there, and can be worked on.
bool find_state(PyObject* entries, const char* name, const at::Tensor& weight, State& found) {
  PyObject* entry = PyDict_GetItem(entries, named(name));
  if (entry == nullptr || !THPVariable_Check(entry)) return false;
  const at::Tensor& state = THPVariable_Unpack(entry);
  if (!lies_like(state, weight)) return false;
  if (is_plain(state, at::kFloat) && THPVariable_CheckExact(entry)) {
    found.values = state.mutable_data_ptr<float>();
    return true;
  }
  Object codes(attribute(entry, CODES));
  if (codes.held == nullptr || !PyTuple_Check(codes.held)) return false;
  const int64_t rows = (weight.numel() + BLOCK - 1) / BLOCK;
  // A tensor of this type and so many places, or none.
  const auto part = [&](Py_ssize_t place, at::ScalarType dtype, int64_t places) -> const at::Tensor* {
    PyObject* item = PyTuple_GET_ITEM(codes.held, place);
    if (!THPVariable_CheckExact(item)) return nullptr;
    const at::Tensor& t = THPVariable_Unpack(item);
    return is_plain(t, dtype) && t.is_contiguous() && t.numel() == places ? &t : nullptr;
  };
  if (PyTuple_GET_SIZE(codes.held) == 1) {
    const at::Tensor* narrow = part(0, at::kBFloat16, rows * BLOCK);
    if (narrow != nullptr) found.narrow = reinterpret_cast<uint16_t*>(narrow->mutable_data_ptr<at::BFloat16>());
  } else if (PyTuple_GET_SIZE(codes.held) == 2) {
    const at::Tensor *bytes = part(0, at::kByte, rows * BLOCK), *scales = part(1, at::kFloat, rows);
    if (bytes == nullptr || scales == nullptr) return false;
    found.codes = bytes->mutable_data_ptr<uint8_t>();
    found.scales = scales->mutable_data_ptr<float>();
  }
  return found.is_encoded();
}

// A split master's halves; false where torch's operations have to work on it.
bool find_halves(const at::Tensor& weight, PyObject* master, Weight& w) {
  if (master == Py_None) return false;
  Object lower(attribute(master, REMAINDER)), strides(attribute(master, STRIDES));
  if (lower.held == nullptr || !THPVariable_CheckExact(lower.held) || strides.held == nullptr) return false;
  const at::Tensor& remainder = THPVariable_Unpack(lower.held);
  if (!is_plain(weight, at::kBFloat16) || !is_plain(remainder, at::kShort)) return false;
  if (!remainder.is_contiguous() || remainder.numel() != weight.numel() || !PyTuple_Check(strides.held)) return false;
  if (PyTuple_GET_SIZE(strides.held) != weight.dim()) return false;
  for (int64_t d = 0; d < weight.dim(); ++d)
    if (PyLong_AsLongLong(PyTuple_GET_ITEM(strides.held, d)) != weight.stride(d)) return false;
  w.weight = reinterpret_cast<uint16_t*>(weight.mutable_data_ptr<at::BFloat16>());
  w.remainder = remainder.mutable_data_ptr<int16_t>();
  return true;
}

// The gradient of a weight with a split master: bfloat16, or float32 after several backward passes.
bool find_gradient(const at::Tensor& gradient, Weight& w) {
  if (is_plain(gradient, at::kFloat)) w.gradient = gradient.const_data_ptr<float>();
  else if (is_plain(gradient, at::kBFloat16))
    w.short_gradient = reinterpret_cast<const uint16_t*>(gradient.const_data_ptr<at::BFloat16>());
  return w.gradient != nullptr || w.short_gradient != nullptr;
}

// A weight's full master, or itself where it is float32; false where torch's operations have to step it.
bool find_values(const at::Tensor& weight, PyObject* master, Weight& w) {
  const at::Tensor& gradient = weight.grad();
  if (!is_plain(gradient, at::kFloat)) return false;
  w.gradient = gradient.const_data_ptr<float>();
  if (master == Py_None) {
    if (!is_plain(weight, at::kFloat)) return false;
    w.values = weight.mutable_data_ptr<float>();
    return true;
  }
  Object parameter(attribute(master, PARAMETER)), clamps(attribute(master, CLAMPS));
  if (parameter.held == nullptr || !THPVariable_Check(parameter.held) || clamps.held != Py_False) return false;
  const at::Tensor& values = THPVariable_Unpack(parameter.held);
  w.is_float16 = is_plain(weight, at::kHalf);
  if (!w.is_float16 && !is_plain(weight, at::kBFloat16)) return false;
  if (!is_plain(values, at::kFloat) || !lies_like(values, weight)) return false;
  w.weight = static_cast<uint16_t*>(weight.mutable_data_ptr());
  w.values = values.mutable_data_ptr<float>();
  w.master = values.unsafeGetTensorImpl();
  return true;
}

// One weight with what is kept for it; false where it has to be stepped by torch's operations.
bool find(
    PyObject* own, PyObject* master, bool is_split, PyObject* states, int64_t smallest, const Options& o,
    std::vector<Weight>& found) {
  if (!THPVariable_Check(own)) return false;
  const at::Tensor& weight = THPVariable_Unpack(own);
  const at::Tensor& gradient = weight.grad();
  if (!gradient.defined()) return true;
  Weight w{};
  if (is_split ? !find_halves(weight, master, w) || !find_gradient(gradient, w) : !find_values(weight, master, w))
    return false;
  if (!lies_like(gradient, weight) || !weight.is_non_overlapping_and_dense()) return false;
  w.size = weight.numel();
  w.impl = weight.unsafeGetTensorImpl();
  PyObject* entries = PyDict_GetItem(states, own);
  const Py_ssize_t kept = entries == nullptr || !PyDict_Check(entries) ? -1 : PyDict_GET_SIZE(entries);
  const int count = o.is_adam ? 2 : o.momentum != 0 ? 1 : 0;
  if (count > 0 && kept < 0) return false;
  if (o.is_adam) {
    PyObject* step = kept == 3 ? PyDict_GetItem(entries, named(STEP)) : nullptr;
    if (step == nullptr || !THPVariable_CheckExact(step)) return false;
    const at::Tensor& steps = THPVariable_Unpack(step);
    if (!is_plain(steps, at::kFloat) || steps.numel() != 1) return false;
    w.count = steps.mutable_data_ptr<float>();
    check_states(w, o);
  }
  const char* names[2] = {o.is_adam ? FIRST : MOMENTUM, SECOND};
  for (int which = 0; which < count; ++which) {
    if (!find_state(entries, names[which], weight, w.states[which])) return false;
    // It is to be encoded, and not yet.
    if (w.states[which].values != nullptr && smallest >= 0 && w.size >= smallest && weight.dim() > 0) return false;
  }
  found.push_back(w);
  return true;
}

// What shares memory is stepped one after another, by torch.
bool are_apart(const std::vector<Weight>& weights) {
  std::vector<std::pair<const char*, const char*>> ranges;
  std::vector<const void*> kept;
  for (const Weight& w : weights) {
    if (w.weight != nullptr) ranges.emplace_back((const char*)w.weight, (const char*)(w.weight + w.size));
    if (w.values != nullptr) ranges.emplace_back((const char*)w.values, (const char*)(w.values + w.size));
    if (w.count != nullptr && w.size > 0) kept.push_back(w.count);
    for (const State& state : w.states)
      for (const void* each : {static_cast<const void*>(state.values), static_cast<const void*>(state.narrow),
                               static_cast<const void*>(state.codes)})
        if (each != nullptr && w.size > 0) kept.push_back(each);
  }
  std::sort(ranges.begin(), ranges.end());
  std::sort(kept.begin(), kept.end());
  for (size_t i = 1; i < ranges.size(); ++i)
    if (ranges[i].first < ranges[i - 1].second) return false;
  return std::adjacent_find(kept.begin(), kept.end()) == kept.end();
}

template <class Function>
PyObject* guarded(Function function) {
  try {
    return function();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// step([(weights, masters or None, flags, numbers)], states by weight, are masters split, smallest encoded or -1): how
// many numbers of all groups were stepped; -1 where torch has to do it, and nothing was changed.
PyObject* step(PyObject*, PyObject* arguments) {
  PyObject *given, *states;
  long long smallest;
  int is_split;
  if (!PyArg_ParseTuple(arguments, "O!O!pL", &PyList_Type, &given, &PyDict_Type, &states, &is_split, &smallest))
    return nullptr;
  return guarded([&]() -> PyObject* {
    std::vector<Group> groups(PyList_GET_SIZE(given));
    std::vector<Weight> all;
    for (size_t which = 0; which < groups.size(); ++which) {
      PyObject *owns, *masters;
      int is_adam, is_fused, maximize, is_decoupled, nesterov;
      Options& o = groups[which].options;
      if (!PyArg_ParseTuple(
              PyList_GET_ITEM(given, which), "O!O!(ppppp)(ddddddd)", &PyList_Type, &owns, &PyList_Type, &masters,
              &is_adam, &is_fused, &maximize, &is_decoupled, &nesterov, &o.rate, &o.decay, &o.momentum, &o.dampening,
              &o.beta1, &o.beta2, &o.eps))
        return nullptr;
      o.is_adam = is_adam, o.is_fused = is_fused, o.maximize = maximize, o.is_decoupled = is_decoupled;
      o.nesterov = nesterov;
      std::vector<Weight>& weights = groups[which].weights;
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(owns); ++i)
        if (!find(PyList_GET_ITEM(owns, i), PyList_GET_ITEM(masters, i), is_split, states, smallest, o, weights)) {
          PyErr_Clear();
          return PyLong_FromLong(-1);
        }
      all.insert(all.end(), weights.begin(), weights.end());
    }
    if (!are_apart(all)) return PyLong_FromLong(-1);
    const std::vector<Chunk> chunks = chunks_of(groups);
    int64_t numbers = 0;
    for (const Weight& w : all) numbers += w.size;
    for (const Weight& w : all) {
      w.impl->bump_version();
      if (w.master != nullptr) w.master->bump_version();
      if (w.count != nullptr) *w.count += 1.f;
    }
    {
      WithoutPython here;
      step_all(chunks, numbers);
    }
    return PyLong_FromLongLong(numbers);
  });
}

// Calls `work` for as many groups of rows or single ones, on all threads, without Python's lock.
template <class Work>
void for_each(int64_t count, int64_t size, Work work) {
  WithoutPython here;
  at::parallel_for(0, count, GRAIN / size, [&](int64_t begin, int64_t end) {
    for (int64_t which = begin; which < end; ++which) work(which);
  });
}

// encode(values, codes, scales), decode(codes, scales, values), round(values, codes): contiguous, as codecs make them.
PyObject* encode(PyObject*, PyObject* arguments) {
  PyObject *values, *codes, *scales;
  if (!PyArg_ParseTuple(arguments, "OOO", &values, &codes, &scales)) return nullptr;
  return guarded([&]() -> PyObject* {
    const float* from = THPVariable_Unpack(values).const_data_ptr<float>();
    uint8_t* to = THPVariable_Unpack(codes).mutable_data_ptr<uint8_t>();
    float* sizes = THPVariable_Unpack(scales).mutable_data_ptr<float>();
    const int64_t rows = THPVariable_Unpack(scales).numel();
    for_each(rows == 0 ? 0 : groups_in(rows), NEIGHBOURS * BLOCK, [&](int64_t group) {
      const int64_t row = group * NEIGHBOURS;
      encode_group(from + row * BLOCK, to + row * BLOCK, sizes + row, row, end_of_group(group, rows) - row);
    });
    Py_RETURN_NONE;
  });
}

PyObject* decode(PyObject*, PyObject* arguments) {
  PyObject *codes, *scales, *values;
  if (!PyArg_ParseTuple(arguments, "OOO", &codes, &scales, &values)) return nullptr;
  return guarded([&]() -> PyObject* {
    const uint8_t* from = THPVariable_Unpack(codes).const_data_ptr<uint8_t>();
    const float* sizes = THPVariable_Unpack(scales).const_data_ptr<float>();
    float* to = THPVariable_Unpack(values).mutable_data_ptr<float>();
    for_each(THPVariable_Unpack(scales).numel(), BLOCK, [&](int64_t row) {
      decode_row(from + row * BLOCK, sizes[row], to + row * BLOCK);
    });
    Py_RETURN_NONE;
  });
}

PyObject* round(PyObject*, PyObject* arguments) {
  PyObject *values, *codes;
  if (!PyArg_ParseTuple(arguments, "OO", &values, &codes)) return nullptr;
  return guarded([&]() -> PyObject* {
    const at::Tensor& all = THPVariable_Unpack(values);
    const float* from = all.const_data_ptr<float>();
    uint16_t* to = reinterpret_cast<uint16_t*>(THPVariable_Unpack(codes).mutable_data_ptr<at::BFloat16>());
    const int64_t n = all.numel();
    const int64_t rows = n / BLOCK;
    for_each(rows == 0 ? 0 : groups_in(rows), NEIGHBOURS * BLOCK, [&](int64_t group) {
      const int64_t row = group * NEIGHBOURS;
      round_group(from + row * BLOCK, to + row * BLOCK, row, end_of_group(group, rows) - row);
    });
    Py_RETURN_NONE;
  });
}

// Calls work(begin, end) for parts of n numbers, on several threads, until it returns false once; whether it never did.
template <class Work>
bool all_of(int64_t n, Work work) {
  std::atomic<bool> are = true;
  at::parallel_for(0, n, GRAIN, [&](int64_t begin, int64_t end) {
    for (int64_t from = begin; from < end && are; from += GRAIN)
      if (!work(from, std::min(from + GRAIN, end))) are = false;
  });
  return are;
}

template <class Bits>
bool is_finite(const at::Tensor& t, Bits infinite) {
  const Bits* numbers = static_cast<const Bits*>(t.const_data_ptr());
  return all_of(t.numel(), [&](int64_t begin, int64_t end) {
    Bits largest = 0;
    for (int64_t i = begin; i < end; ++i) largest = std::max<Bits>(largest, numbers[i] & infinite);
    return largest != infinite;
  });
}

// are_finite(tensors): whether all numbers are; None where that cannot be told here.
PyObject* are_finite(PyObject*, PyObject* given) {
  if (!PyList_Check(given)) Py_RETURN_NONE;
  return guarded([&]() -> PyObject* {
    std::vector<const at::Tensor*> tensors;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
      if (!THPVariable_Check(PyList_GET_ITEM(given, i))) Py_RETURN_NONE;
      const at::Tensor& t = THPVariable_Unpack(PyList_GET_ITEM(given, i));
      if (!is_plain(t, at::kFloat) && !is_plain(t, at::kBFloat16) && !is_plain(t, at::kHalf)) Py_RETURN_NONE;
      if (!t.is_non_overlapping_and_dense()) Py_RETURN_NONE;
      tensors.push_back(&t);
    }
    bool are = true;
    {
      WithoutPython here;
      for (const at::Tensor* t : tensors)
        are = are && (t->scalar_type() == at::kFloat ? is_finite<uint32_t>(*t, INFINITE)
                        : is_finite<uint16_t>(*t, t->scalar_type() == at::kHalf ? 0x7C00 : 0x7F80));
    }
    return PyBool_FromLong(are);
  });
}

// multiply(tensors, factor, is_counted, are_weights): multiplies float32 tensors in place by a 0-dimensional one, or the
// gradients of weights, None among them, and counts that in their versions; whether all numbers were finite before. None,
// with nothing done, where torch's operations have to do it.
PyObject* multiply(PyObject*, PyObject* arguments) {
  PyObject *given, *by;
  int is_counted, are_weights;
  if (!PyArg_ParseTuple(arguments, "O!Opp", &PyList_Type, &given, &by, &is_counted, &are_weights)) return nullptr;
  if (!THPVariable_CheckExact(by)) Py_RETURN_NONE;
  return guarded([&]() -> PyObject* {
    const at::Tensor& factor = THPVariable_Unpack(by);
    if (!is_plain(factor, at::kFloat) || factor.numel() != 1) Py_RETURN_NONE;
    std::vector<at::Tensor> tensors;
    tensors.reserve(PyList_GET_SIZE(given));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
      PyObject* item = PyList_GET_ITEM(given, i);
      if (are_weights ? !THPVariable_Check(item) : !THPVariable_CheckExact(item)) Py_RETURN_NONE;
      const at::Tensor& tensor = are_weights ? THPVariable_Unpack(item).grad() : THPVariable_Unpack(item);
      if (!tensor.defined() && are_weights) continue;
      if (!is_plain(tensor, at::kFloat) || !tensor.is_non_overlapping_and_dense()) Py_RETURN_NONE;
      tensors.push_back(tensor);
    }
    const float times = *factor.const_data_ptr<float>();
    std::atomic<bool> are = true;
    for (const at::Tensor& tensor : tensors)
      if (is_counted) tensor.unsafeGetTensorImpl()->bump_version();
    {
      WithoutPython here;
      for (const at::Tensor& tensor : tensors) {
        float* numbers = tensor.mutable_data_ptr<float>();
        at::parallel_for(0, tensor.numel(), GRAIN, [&](int64_t begin, int64_t end) {
          uint32_t largest = 0;
          for (int64_t i = begin; i < end; ++i) {
            largest = std::max(largest, bits_of(numbers[i]) & INFINITE);
            numbers[i] *= times;
          }
          if (largest == INFINITE) are = false;
        });
      }
    }
    return PyBool_FromLong(are);
  });
}

// -- values of masters ------------------------------------------------------------------------------------------------

// The halves of a weight with a split master, with its present memory; false where torch's operations have to read it.
bool find_laid_out(PyObject* own, PyObject* master, Weight& w) {
  if (!THPVariable_Check(own)) return false;
  const at::Tensor& weight = THPVariable_Unpack(own);
  if (!find_halves(weight, master, w) || !weight.is_non_overlapping_and_dense()) return false;
  Object address(attribute(master, ADDRESS));
  w.size = weight.numel();
  return address.held != nullptr && PyLong_AsVoidPtr(address.held) == weight.data_ptr();
}

// joined(weights, masters): the float32 values of split masters, each in memory of its own. None where torch's operations
// have to compute one.
PyObject* joined(PyObject*, PyObject* arguments) {
  PyObject *owns, *masters;
  if (!PyArg_ParseTuple(arguments, "O!O!", &PyList_Type, &owns, &PyList_Type, &masters)) return nullptr;
  return guarded([&]() -> PyObject* {
    const Py_ssize_t count = PyList_GET_SIZE(owns);
    std::vector<Weight> weights(count);
    for (Py_ssize_t i = 0; i < count; ++i)
      if (!find_laid_out(PyList_GET_ITEM(owns, i), PyList_GetItem(masters, i), weights[i])) {
        PyErr_Clear();
        Py_RETURN_NONE;
      }
    std::vector<at::Tensor> made;
    for (Py_ssize_t i = 0; i < count; ++i) {
      const at::Tensor& weight = THPVariable_Unpack(PyList_GET_ITEM(owns, i));
      made.emplace_back(at::detail::empty_strided_cpu(weight.sizes(), weight.strides(), at::kFloat));
      weights[i].values = made.back().mutable_data_ptr<float>();
    }
    {
      WithoutPython here;
      for (const Weight& w : weights)
        at::parallel_for(0, w.size, GRAIN, [&](int64_t begin, int64_t end) {
          join(w.weight + begin, w.remainder + begin, w.values + begin, end - begin);
        });
    }
    PyObject* found = PyList_New(count);
    for (Py_ssize_t i = 0; i < count && found != nullptr; ++i) {
      PyObject* wrapped = THPVariable_Wrap(made[i]);
      if (wrapped == nullptr) Py_CLEAR(found);
      else PyList_SET_ITEM(found, i, wrapped);
    }
    return found;
  });
}

// Asks for memory that is read soon: the processor's own prefetching ends at each page.
void fetch(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch(static_cast<const char*>(from) + at);
}

bool are_joined(const float* values, const uint16_t* weight, const int16_t* remainder, int64_t n) {
  float expected[CHUNK];
  for (int64_t begin = 0; begin < n; begin += CHUNK) {
    const int64_t count = std::min(CHUNK, n - begin);
    join(weight + begin, remainder + begin, expected, count);
    if (std::memcmp(expected, values + begin, count * sizeof(float)) != 0) return false;
  }
  return true;
}

// differing(values, weights, masters or None): the indices of float32 values that their 16-bit weights do not mean, bit
// for bit: with None the weight has to be the rounded values, with split masters these have to be the values. None where
// torch's operations have to compare one.
PyObject* differing(PyObject*, PyObject* arguments) {
  PyObject *values, *owns, *masters;
  if (!PyArg_ParseTuple(arguments, "O!O!O", &PyList_Type, &values, &PyList_Type, &owns, &masters)) return nullptr;
  return guarded([&]() -> PyObject* {
    const Py_ssize_t count = PyList_GET_SIZE(owns);
    std::vector<Weight> weights(count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject *own = PyList_GET_ITEM(owns, i), *item = PyList_GetItem(values, i);
      Weight& w = weights[i];
      bool is_known = item != nullptr && THPVariable_Check(own) && THPVariable_Check(item);
      if (is_known) {
        const at::Tensor &weight = THPVariable_Unpack(own), &wide = THPVariable_Unpack(item);
        is_known = is_plain(wide, at::kFloat) && lies_like(wide, weight) && weight.is_non_overlapping_and_dense();
        if (masters != Py_None) {
          is_known = is_known && PyList_Check(masters) && find_laid_out(own, PyList_GetItem(masters, i), w);
        } else if (is_known) {
          w.is_float16 = is_plain(weight, at::kHalf);
          is_known = w.is_float16 || is_plain(weight, at::kBFloat16);
          w.weight = static_cast<uint16_t*>(const_cast<void*>(weight.const_data_ptr()));
          w.size = weight.numel();
        }
        if (is_known) w.values = const_cast<float*>(wide.const_data_ptr<float>());
      }
      if (!is_known) {
        PyErr_Clear();
        Py_RETURN_NONE;
      }
    }
    std::vector<Py_ssize_t> found;
    {
      WithoutPython here;
      for (Py_ssize_t i = 0; i < count; ++i) {
        const Weight& w = weights[i];
        const bool are_same = all_of(w.size, [&](int64_t begin, int64_t end) {
          bool are = true;
          for (int64_t at = begin; at < end && are; at += FETCHED) {
            const int64_t n = std::min(FETCHED, end - at), next = std::min(FETCHED, w.size - at - n);
            fetch(w.values + at + n, next * sizeof(float));
            fetch(w.weight + at + n, next * sizeof(uint16_t));
            if (w.remainder != nullptr) fetch(w.remainder + at + n, next * sizeof(int16_t));
            are = w.remainder != nullptr ? are_joined(w.values + at, w.weight + at, w.remainder + at, n)
                                         : are_rounded(w.values + at, w.weight + at, w.is_float16, n);
          }
          return are;
        });
        if (!are_same) found.push_back(i);
      }
    }
    PyObject* indices = PyList_New(found.size());
    for (size_t i = 0; i < found.size() && indices != nullptr; ++i)
      PyList_SET_ITEM(indices, i, PyLong_FromSsize_t(found[i]));
    return indices;
  });
}

// -- casts of parameters ------------------------------------------------------------------------------------------------

namespace autograd = torch::autograd;

// What casts were recorded with: their gradients, which autograd has brought into the parameters' type, are passed on.
struct Passed : autograd::Node {
  autograd::variable_list apply(autograd::variable_list&& gradients) override { return std::move(gradients); }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}
  autograd::variable_list apply_with_saved(
      const autograd::variable_list& gradients, torch::dynamo::autograd::SwapSavedVariables&) override {
    return gradients;
  }
};

using Recorded = decltype(autograd::Edge::function);  // another pointer since torch 2.13

template <class Kind, class Pointer>
Pointer new_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<autograd::Node>>) return std::make_shared<Kind>();
  else return c10::make_intrusive<Kind>();
}

// Float32 numbers of the CPU in a 16-bit type, without torch's dispatcher, which takes longer than a small weight.
at::Tensor rounded(const at::Tensor& values, at::ScalarType type) {
  const at::Tensor made(at::detail::empty_strided_cpu(values.sizes(), values.strides(), type));
  const float* from = values.const_data_ptr<float>();
  uint16_t* to = static_cast<uint16_t*>(made.mutable_data_ptr());
  at::parallel_for(0, values.numel(), GRAIN, [&](int64_t begin, int64_t end) {
    (type == at::kHalf ? round_to_float16 : round_to_bfloat16)(from + begin, to + begin, end - begin);
  });
  return made;
}

// casts(parameters, kind, dtype, numbers): of each, of that class too, or None where it is not of it, computed or
// sparse; one node of the graph stands for so many numbers.
PyObject* casts(PyObject*, PyObject* arguments) {
  PyObject *given, *kind, *dtype;
  Py_ssize_t numbers;
  if (!PyArg_ParseTuple(arguments, "O!OO!n", &PyList_Type, &given, &kind, &THPDtypeType, &dtype, &numbers))
    return nullptr;
  return guarded([&]() -> PyObject* {
    const Py_ssize_t count = PyList_GET_SIZE(given);
    std::vector<at::Tensor> from, to, slow, copies;
    std::vector<bool> is_ordinary;
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* item = PyList_GET_ITEM(given, i);
      is_ordinary.push_back(reinterpret_cast<PyObject*>(Py_TYPE(item)) == kind && THPVariable_Check(item));
      if (!is_ordinary[i]) continue;
      const at::Tensor& parameter = THPVariable_Unpack(item);
      is_ordinary[i] = parameter.layout() == at::kStrided && parameter.is_leaf() && !parameter.is_inference();
      if (is_ordinary[i]) from.push_back(parameter);
    }
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      const at::ScalarType type = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
      const bool is_known = type == at::kHalf || type == at::kBFloat16;
      for (const at::Tensor& each : from) {
        const bool is_fast = is_known && is_plain(each, at::kFloat) && each.is_non_overlapping_and_dense();
        to.push_back(is_fast ? rounded(each, type) : at::empty_like(each, each.options().dtype(type)));
        if (is_fast) continue;
        slow.push_back(each);
        copies.push_back(to.back());
      }
      if (!slow.empty()) at::_foreach_copy_(copies, slow);
    }
    Recorded node;
    int64_t recorded = 0;
    for (size_t i = 0; i < from.size() && at::GradMode::is_enabled(); ++i) {
      if (!from[i].requires_grad()) continue;
      if (node == nullptr || recorded + from[i].numel() > numbers) {
        node = new_node<Passed, Recorded>();
        recorded = 0;
      }
      recorded += from[i].numel();
      // As what the parameter is, not the cast: gradients arrive in this type.
      const uint32_t place = node->add_input_metadata(from[i]);
      node->add_next_edge(autograd::impl::gradient_edge(from[i]));
      autograd::impl::set_gradient_edge(to[i], {node, place});
    }
    PyObject* made = PyList_New(count);
    size_t next = 0;
    for (Py_ssize_t i = 0; i < count && made != nullptr; ++i) {
      PyTypeObject* type = reinterpret_cast<PyTypeObject*>(kind);
      PyObject* wrapped = is_ordinary[i] ? THPVariable_Wrap(to[next++], type) : Py_NewRef(Py_None);
      if (wrapped == nullptr) Py_CLEAR(made);
      else PyList_SET_ITEM(made, i, wrapped);
    }
    return made;
  });
}

// are_as_seen(owners, name, dicts, entries): whether the attributes of this name are these dicts, and the dicts have
// these objects for keys, one dict after another, and for values, which follow in the same order.
PyObject* are_as_seen(PyObject*, PyObject* arguments) {
  PyObject *owners, *name, *dicts, *entries, *key, *value;
  if (!PyArg_ParseTuple(arguments, "O!UO!O!", &PyList_Type, &owners, &name, &PyList_Type, &dicts, &PyList_Type, &entries))
    return nullptr;
  const Py_ssize_t count = PyList_GET_SIZE(entries) / 2;
  Py_ssize_t seen = 0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(owners); ++i) {
    // What modules do for names that they do not have takes time.
    PyObject *dict = PyObject_GenericGetAttr(PyList_GET_ITEM(owners, i), name), *known = PyList_GetItem(dicts, i);
    if (dict == nullptr || known == nullptr) return nullptr;
    Py_DECREF(dict);
    if (dict != known || !PyDict_Check(dict)) Py_RETURN_FALSE;
    Py_ssize_t at = 0;
    for (; PyDict_Next(dict, &at, &key, &value); ++seen)
      if (seen == count || PyList_GET_ITEM(entries, seen) != key || PyList_GET_ITEM(entries, count + seen) != value)
        Py_RETURN_FALSE;
  }
  return PyBool_FromLong(seen == count);
}

// replace_entries(dicts, names, expected, values): sets each dict's entry of this name, if all have the expected values;
// four lists. Whether they had: otherwise nothing is set.
PyObject* replace_entries(PyObject*, PyObject* arguments) {
  PyObject *dicts, *names, *expected, *values;
  if (!PyArg_ParseTuple(arguments, "O!O!O!O!", &PyList_Type, &dicts, &PyList_Type, &names, &PyList_Type, &expected,
                        &PyList_Type, &values))
    return nullptr;
  const Py_ssize_t count = PyList_GET_SIZE(dicts);
  if (PyList_GET_SIZE(names) != count || PyList_GET_SIZE(expected) != count || PyList_GET_SIZE(values) != count)
    Py_RETURN_FALSE;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!PyDict_Check(PyList_GET_ITEM(dicts, i))) Py_RETURN_FALSE;
    PyObject* present = PyDict_GetItemWithError(PyList_GET_ITEM(dicts, i), PyList_GET_ITEM(names, i));
    if (present != PyList_GET_ITEM(expected, i)) {
      if (PyErr_Occurred() != nullptr) return nullptr;
      Py_RETURN_FALSE;
    }
  }
  for (Py_ssize_t i = 0; i < count; ++i)
    if (PyDict_SetItem(PyList_GET_ITEM(dicts, i), PyList_GET_ITEM(names, i), PyList_GET_ITEM(values, i)) != 0)
      return nullptr;
  Py_RETURN_TRUE;
}

// exchanged(items, others): a list with the object that `others` has for an item's id, or else the item.
PyObject* exchanged(PyObject*, PyObject* arguments) {
  PyObject *items, *others;
  if (!PyArg_ParseTuple(arguments, "O!O!", &PyList_Type, &items, &PyDict_Type, &others)) return nullptr;
  PyObject* found = PyList_New(PyList_GET_SIZE(items));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items) && found != nullptr; ++i) {
    PyObject* item = PyList_GET_ITEM(items, i);
    Object key(PyLong_FromVoidPtr(item));
    PyObject* other = key.held == nullptr ? nullptr : PyDict_GetItemWithError(others, key.held);
    if (PyErr_Occurred() != nullptr) Py_CLEAR(found);
    else PyList_SET_ITEM(found, i, Py_NewRef(other == nullptr ? item : other));
  }
  return found;
}

// versions(tensors): how often each was written to; None where one of them does not count that.
PyObject* versions(PyObject*, PyObject* given) {
  if (!PyList_Check(given)) Py_RETURN_NONE;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
    PyObject* item = PyList_GET_ITEM(given, i);
    if (!THPVariable_Check(item) || THPVariable_Unpack(item).is_inference()) Py_RETURN_NONE;
  }
  return guarded([&]() -> PyObject* {
    PyObject* found = PyList_New(PyList_GET_SIZE(given));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given) && found != nullptr; ++i)
      PyList_SET_ITEM(found, i, PyLong_FromLong(THPVariable_Unpack(PyList_GET_ITEM(given, i))._version()));
    return found;
  });
}

// changed_versions(tensors, expected): what versions() returns; None where all are the expected ones; two lists.
PyObject* changed_versions(PyObject* self, PyObject* args) {
  PyObject *tensors, *expected;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &tensors, &PyList_Type, &expected)) return nullptr;
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  bool are_same = count == PyList_GET_SIZE(expected);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PyList_GET_ITEM(tensors, i);
    if (!THPVariable_Check(item) || THPVariable_Unpack(item).is_inference())
      return PyErr_Format(PyExc_TypeError, "changed_versions() reads tensors with versions");
    are_same = are_same && THPVariable_Unpack(item)._version() == PyLong_AsLongLong(PyList_GET_ITEM(expected, i));
  }
  if (PyErr_Occurred() != nullptr) return nullptr;
  return are_same ? Py_NewRef(Py_None) : versions(self, tensors);
}

// set_data(tensors, values): does tensor.data = value for each; two lists. False, with nothing set, where one is of a
// subclass.
PyObject* set_data(PyObject*, PyObject* args) {
  PyObject *tensors, *values;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &tensors, &PyList_Type, &values)) return nullptr;
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  if (PyList_GET_SIZE(values) != count) Py_RETURN_FALSE;
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!is_of_no_subclass(PyList_GET_ITEM(tensors, i)) || !is_of_no_subclass(PyList_GET_ITEM(values, i)))
      Py_RETURN_FALSE;
  return guarded([&]() -> PyObject* {
    for (Py_ssize_t i = 0; i < count; ++i)
      THPVariable_Unpack(PyList_GET_ITEM(tensors, i)).set_data(THPVariable_Unpack(PyList_GET_ITEM(values, i)));
    Py_RETURN_TRUE;
  });
}

// layouts(tensors): bytes with each tensor's address, number of dimensions, sizes and strides. None where the argument is
// no list of tensors with memory on the CPU.
PyObject* layouts(PyObject*, PyObject* given) {
  if (!PyList_Check(given)) Py_RETURN_NONE;
  return guarded([&]() -> PyObject* {
    std::vector<int64_t> found;
    found.reserve(PyList_GET_SIZE(given) * 6);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
      if (!THPVariable_Check(PyList_GET_ITEM(given, i))) Py_RETURN_NONE;
      const at::Tensor& t = THPVariable_Unpack(PyList_GET_ITEM(given, i));
      const bool is_here = t.is_cpu() && t.layout() == at::kStrided && !t.unsafeGetTensorImpl()->is_python_dispatch();
      if (!is_here) Py_RETURN_NONE;
      found.push_back(reinterpret_cast<int64_t>(t.const_data_ptr()));
      found.push_back(t.dim());
      found.insert(found.end(), t.sizes().begin(), t.sizes().end());
      found.insert(found.end(), t.strides().begin(), t.strides().end());
    }
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(found.data()), found.size() * sizeof(int64_t));
  });
}

// are_bare(tensors): whether each requires a gradient, and has no hooks and no attributes of Python's. None where the
// argument is no list of tensors.
PyObject* are_bare(PyObject*, PyObject* given) {
  if (!PyList_Check(given)) Py_RETURN_NONE;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
    PyObject* item = PyList_GET_ITEM(given, i);
    if (!THPVariable_Check(item)) Py_RETURN_NONE;
    const THPVariable* tensor = reinterpret_cast<THPVariable*>(item);
    const auto is_set = [](PyObject* hooks) { return hooks != nullptr && hooks != Py_None; };
    if (is_set(tensor->backward_hooks) || is_set(tensor->post_accumulate_grad_hooks)) Py_RETURN_FALSE;
    if (!THPVariable_Unpack(item).requires_grad()) Py_RETURN_FALSE;
    Object attributes(PyObject_GenericGetDict(item, nullptr));
    if (attributes.held == nullptr) PyErr_Clear();
    else if (PyDict_GET_SIZE(attributes.held) != 0) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

// concatenated(tensors): their 16-bit numbers in one int16 tensor. None where torch's operations have to do it.
PyObject* concatenated(PyObject*, PyObject* given) {
  if (!PyList_Check(given)) Py_RETURN_NONE;
  return guarded([&]() -> PyObject* {
    int64_t size = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
      if (!THPVariable_Check(PyList_GET_ITEM(given, i))) Py_RETURN_NONE;
      const at::Tensor& t = THPVariable_Unpack(PyList_GET_ITEM(given, i));
      if (!t.is_contiguous() || (!is_plain(t, at::kBFloat16) && !is_plain(t, at::kHalf))) Py_RETURN_NONE;
      size += t.numel();
    }
    const at::Tensor made(at::detail::empty_cpu({size}, at::kShort));
    int16_t* to = made.mutable_data_ptr<int16_t>();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
      const at::Tensor& t = THPVariable_Unpack(PyList_GET_ITEM(given, i));
      if (t.numel() > 0) std::memcpy(to, t.const_data_ptr(), t.numel() * sizeof(int16_t));
      to += t.numel();
    }
    return THPVariable_Wrap(made);
  });
}

PyObject* list_of_grads(PyObject* tensors) {
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  PyObject* found = PyList_New(count);
  for (Py_ssize_t i = 0; i < count && found != nullptr; ++i) {
    const at::Tensor& grad = THPVariable_Unpack(PyList_GET_ITEM(tensors, i)).grad();
    PyObject* wrapped = grad.defined() ? THPVariable_Wrap(grad) : Py_NewRef(Py_None);
    if (wrapped == nullptr) Py_CLEAR(found);
    else PyList_SET_ITEM(found, i, wrapped);
  }
  return found;
}

bool are_tensors(PyObject* list) {
  if (!PyList_Check(list)) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i)
    if (!THPVariable_Check(PyList_GET_ITEM(list, i))) return false;
  return true;
}

// grads(tensors): each tensor's grad. None where the argument is no list of tensors.
PyObject* grads(PyObject*, PyObject* given) {
  if (!are_tensors(given)) Py_RETURN_NONE;
  return guarded([&] { return list_of_grads(given); });
}

// changed_grads(tensors, expected): each tensor's grad. None where all are the expected ones, None among them; two lists.
PyObject* changed_grads(PyObject*, PyObject* args) {
  PyObject *tensors, *expected;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &tensors, &PyList_Type, &expected)) return nullptr;
  if (!are_tensors(tensors)) return PyErr_Format(PyExc_TypeError, "changed_grads() reads tensors");
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  return guarded([&]() -> PyObject* {
    if (PyList_GET_SIZE(expected) != count) return list_of_grads(tensors);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* grad = PyList_GET_ITEM(expected, i);
      const at::Tensor& found = THPVariable_Unpack(PyList_GET_ITEM(tensors, i)).grad();
      const bool is_same = grad == Py_None ? !found.defined()
                                           : THPVariable_Check(grad) && found.is_same(THPVariable_Unpack(grad));
      if (!is_same) return list_of_grads(tensors);
    }
    Py_RETURN_NONE;
  });
}

// set_grads(tensors, grads): sets each tensor's grad, None among them; two lists. False, with nothing set, where a tensor
// or its grad is of a subclass, or the two differ in dtype, device or shape: torch's own setter has an error for that.
PyObject* set_grads(PyObject*, PyObject* args) {
  PyObject *tensors, *grads;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &tensors, &PyList_Type, &grads)) return nullptr;
  const Py_ssize_t count = PyList_GET_SIZE(tensors);
  if (PyList_GET_SIZE(grads) != count) Py_RETURN_FALSE;
  return guarded([&]() -> PyObject* {
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject *item = PyList_GET_ITEM(tensors, i), *grad = PyList_GET_ITEM(grads, i);
      if (!is_of_no_subclass(item)) Py_RETURN_FALSE;
      if (grad == Py_None) continue;
      if (!is_of_no_subclass(grad) || grad == item) Py_RETURN_FALSE;
      const at::Tensor &tensor = THPVariable_Unpack(item), &its = THPVariable_Unpack(grad);
      const bool fits = its.layout() == at::kStrided && tensor.layout() == at::kStrided &&
                        its.scalar_type() == tensor.scalar_type() && its.device() == tensor.device() &&
                        its.sizes() == tensor.sizes();
      if (!fits) Py_RETURN_FALSE;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* grad = PyList_GET_ITEM(grads, i);
      at::Tensor tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors, i));
      tensor.mutable_grad() = grad == Py_None ? at::Tensor() : THPVariable_Unpack(grad);
    }
    Py_RETURN_TRUE;
  });
}

// are_plain(gradients): whether each is a torch.Tensor itself, dense, float32, and on the CPU or meta; None is not.
PyObject* are_plain(PyObject*, PyObject* given) {
  if (!PyList_Check(given)) Py_RETURN_NONE;
  if (PyList_GET_SIZE(given) == 0) Py_RETURN_FALSE;
  return guarded([&]() -> PyObject* {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
      PyObject* item = PyList_GET_ITEM(given, i);
      if (!THPVariable_CheckExact(item) || Py_TYPE(item) == (PyTypeObject*)ParameterClass) Py_RETURN_FALSE;
      const at::Tensor& tensor = THPVariable_Unpack(item);
      const bool is_here = tensor.is_cpu() || tensor.is_meta();
      if (!is_here || tensor.layout() != at::kStrided || tensor.scalar_type() != at::kFloat) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
  });
}

PyMethodDef methods[] = {
    {"are_plain", are_plain, METH_O, nullptr},
    {"grads", grads, METH_O, nullptr},
    {"changed_grads", changed_grads, METH_VARARGS, nullptr},
    {"set_grads", set_grads, METH_VARARGS, nullptr},
    {"are_as_seen", are_as_seen, METH_VARARGS, nullptr},
    {"replace_entries", replace_entries, METH_VARARGS, nullptr},
    {"exchanged", exchanged, METH_VARARGS, nullptr},
    {"versions", versions, METH_O, nullptr},
    {"changed_versions", changed_versions, METH_VARARGS, nullptr},
    {"set_data", set_data, METH_VARARGS, nullptr},
    {"layouts", layouts, METH_O, nullptr},
    {"are_bare", are_bare, METH_O, nullptr},
    {"concatenated", concatenated, METH_O, nullptr},
    {"casts", casts, METH_VARARGS, nullptr},
    {"step", step, METH_VARARGS, nullptr},
    {"are_finite", are_finite, METH_O, nullptr},
    {"multiply", multiply, METH_VARARGS, nullptr},
    {"joined", joined, METH_VARARGS, nullptr},
    {"differing", differing, METH_VARARGS, nullptr},
    {"encode", encode, METH_VARARGS, nullptr},
    {"decode", decode, METH_VARARGS, nullptr},
    {"round", round, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "one_pass", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_one_pass() {
  return PyModule_Create(&module);
}
