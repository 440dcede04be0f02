// A step of all weights of an optimizer, in one pass over memory.

#pragma once

#include <Python.h>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "codecs.h"
#include "masters.h"
#include "objects.h"
#include "updates.h"
#include "weights.h"

namespace {

// A part of a weight, which one thread steps: a group of rows, see codecs.h.
struct Chunk {
  const Weight* weight;
  const Options* options;
  int64_t begin, size;
};

// Steps n numbers of a chunk, whose moments are float32.
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
    for (int64_t i = 0; i < n; ++i) g[i] = float_of(static_cast<uint32_t>(weight.short_gradient[begin + i]) << 16);
  // Copied only if it is changed: a copy would take as long as the rest of the step.
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
      write_back(weight, begin + body, p + body, rest);
      return;
    }
  }
  write_back(weight, begin, p, n);
}

// Decodes the moments of a chunk, steps it, and encodes them again.
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
        for (int64_t i = 0; i < n; ++i)
          states[which][i] = float_of(static_cast<uint32_t>(state.narrow[begin + i]) << 16);
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

// The weights of a parameter group.
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

// Steps all chunks, on all threads.
void step_all(const std::vector<Chunk>& chunks, int64_t numbers) {
  const int64_t count = static_cast<int64_t>(chunks.size()), each = numbers / std::max<int64_t>(count, 1) + 1;
  at::parallel_for(0, count, std::max<int64_t>(GRAIN / each, 1), [&](int64_t from, int64_t to) {
    at::AutoDispatchBelowADInplaceOrView guard;
    Scratch scratch;
    for (int64_t i = from; i < to; ++i) step_chunk(chunks[i], scratch);
    update_waiting(scratch);
  });
}

// step(groups, states, is_split, smallest): steps all weights that have a gradient.
//
// groups: for each parameter group a tuple of its weights, their masters or None, flags, and numbers (see Options).
// states: weight -> dict. is_split: whether masters are split. smallest: the size from which states are encoded, or -1.
// Returns how many numbers were stepped; -1 if torch's operations have to step, with nothing changed.
PyObject* step(PyObject*, PyObject* arguments) {
  PyObject *given, *states;
  long long smallest;
  int is_split;
  if (!PyArg_ParseTuple(arguments, "O!O!pL", &PyList_Type, &given, &PyDict_Type, &states, &is_split, &smallest))
    return nullptr;
  return with_errors([&]() -> PyObject* {
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
    if (!are_disjoint(all)) return PyLong_FromLong(-1);
    const std::vector<Chunk> chunks = chunks_of(groups);
    int64_t numbers = 0;
    for (const Weight& w : all) numbers += w.size;
    for (const Weight& w : all) {
      w.impl->bump_version();
      if (w.master != nullptr) w.master->bump_version();
      if (w.count != nullptr) *w.count += 1.f;
    }
    {
      ReleasedGil released;
      step_all(chunks, numbers);
    }
    return PyLong_FromLongLong(numbers);
  });
}

}  // namespace
