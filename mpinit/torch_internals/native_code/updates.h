// The updates of SGD, Adam and AdamW for a part of a weight. Each rounding is one of torch's own step, in its order.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sqrt.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "codecs.h"
#include "masters.h"
#include "numbers.h"

namespace {

// Numbers that are stepped at a time, so that they stay in the processor's cache from one loop to the next.
constexpr int64_t CHUNK = 256;
// The same where torch is called for square roots. A call takes as long as some hundred numbers do, so that several
// small weights share one.
constexpr int64_t CHUNK_OF_ROOTS = 4096;
// torch's fused steps work on LANES numbers at a time. The rest at a tensor's end is rounded in another order.
constexpr int64_t LANES = 8;

// An entry of an optimizer's state, such as a moment.
struct State {
  float* values = nullptr;
  // An encoded state has bfloat16 numbers, or 8-bit codes with scales, instead of values.
  uint16_t* narrow = nullptr;
  uint8_t* codes = nullptr;
  float* scales = nullptr;
  bool is_encoded() const { return narrow != nullptr || codes != nullptr; }
};

// A weight with the memory that a step of it reads and writes.
struct Weight {
  // A full master, or a float32 weight. nullptr with a split master.
  float* values;
  uint16_t* weight;  // the 16-bit weight; nullptr if the weight is float32
  int16_t* remainder;  // a split master's
  bool is_float16;
  const float* gradient;
  const uint16_t* short_gradient;  // a bfloat16 gradient
  int64_t size;
  State states[2];
  float* count;  // Adam's number of steps
  float step, root;  // Adam's step size, and the root of the bias correction of its second moment
  c10::TensorImpl *impl, *master;
};

// The options of a parameter group.
struct Options {
  bool is_adam, is_fused, maximize, is_decoupled, nesterov;
  double rate, decay, momentum, dampening, beta1, beta2, eps;
};

// Computes Adam's step size and bias correction of the next step.
void compute_corrections(Weight& weight, const Options& o) {
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

// Returns the factor of a decoupled weight decay; 1 if the decay is added to the gradient.
float decay_factor(const Options& o) {
  return o.is_decoupled ? static_cast<float>(1 - o.rate * o.decay) : 1.f;
}

// Applies a decoupled weight decay.
void decay(float* p, int64_t n, const Options& o) {
  const float keep = decay_factor(o);
  if (o.decay == 0 || !o.is_decoupled) return;
  for (int64_t i = 0; i < n; ++i) p[i] *= keep;
}

// Updates parameters p and momentum m (may be nullptr) with gradients g. is_tail: these are the last numbers of a
// tensor.
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

// A part of a weight whose moments are computed, and whose update waits for the square roots of several parts.
struct Waiting {
  const Weight* weight;
  const Options* options;
  int64_t begin, size, at;
  const float* first;
};

// Memory of a thread. The lengths are no powers of two: arrays at such distances replace each other in a cache.
struct Scratch {
  alignas(64) float p[CHUNK_OF_ROOTS + 144], g[CHUNK_OF_ROOTS + 144], root[CHUNK_OF_ROOTS + 144];
  alignas(64) uint16_t rounded[CHUNK_OF_ROOTS + 144];
  alignas(64) float decoded[2][2 * NEIGHBOURS * BLOCK + 144];
  at::Tensor roots = at::from_blob(root, {CHUNK_OF_ROOTS}, at::kFloat);
  std::vector<Waiting> waiting;
  int64_t filled = 0;
};

// Updates Adam's moments m and v with gradients g.
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

// Steps fused Adam in one loop, so that reading memory overlaps with divisions. is_small: the weight of the gradient in
// the first moment is below 0.5, for which torch's lerp has a formula of its own. rounds: also rounds into bfloat16
// weights.
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

// Returns the float32 numbers of a weight from `begin` on; a split master has them in the scratch memory.
float* values_of(const Weight& weight, int64_t begin, float* scratch) {
  return weight.values == nullptr ? scratch : weight.values + begin;
}

// Rounds new values p into the 16-bit weight, and into the remainder of a split master.
void write_back(const Weight& weight, int64_t begin, const float* p, int64_t n) {
  if (weight.remainder != nullptr)
    split(p, weight.weight + begin, weight.remainder + begin, n);
  else if (weight.weight != nullptr)
    (weight.is_float16 ? round_to_float16 : round_to_bfloat16)(p, weight.weight + begin, n);
}

// Computes the square roots of all waiting parts, and updates their weights.
void update_waiting(Scratch& scratch) {
  const int64_t n = scratch.filled;
  if (n == 0) return;
  // torch's square root is that of the vector library it was built with, which may not be correctly rounded.
  (n == CHUNK_OF_ROOTS ? scratch.roots : at::from_blob(scratch.root, {n}, at::kFloat)).sqrt_();
  for (const Waiting& part : scratch.waiting) {
    const float step = part.weight->step, over = part.weight->root, eps = static_cast<float>(part.options->eps);
    float* __restrict p = values_of(*part.weight, part.begin, scratch.p + part.at);
    const float *m = part.first, *root = scratch.root + part.at;
    for (int64_t i = 0; i < part.size; ++i) p[i] = p[i] + step * m[i] / (root[i] / over + eps);
    write_back(*part.weight, part.begin, p, part.size);
  }
  scratch.waiting.clear();
  scratch.filled = 0;
}

}  // namespace
