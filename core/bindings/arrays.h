// Numpy arrays that own what the core returns.
#pragma once

#include <cstring>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "rows/row_header.h"
#include "segment/record.h"

namespace hotrow::bindings {

template <class T>
nb::ndarray<nb::numpy, T> array(std::vector<T> values, std::vector<size_t> shape) {
  auto* data = new std::vector<T>(std::move(values));
  nb::capsule owner(data, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(data->data(), shape.size(), shape.data(), owner);
}

template <class T>
nb::object array(std::unique_ptr<T[]> data, std::initializer_list<size_t> shape) {
  T* raw = data.release();
  nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T>(raw, shape, owner));
}

inline std::vector<float> floats_of(const std::vector<char>& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

// keys, counts, last steps, values [n, floats]
inline nb::tuple rows_tuple(const std::vector<RecordHead>& heads, std::vector<float> values) {
  std::vector<int64_t> keys, counts, steps;
  for (const RecordHead& head : heads) {
    keys.push_back(head.key);
    counts.push_back(static_cast<int64_t>(decode_count(head.count)));
    steps.push_back(step_of(head.stamp));
  }
  const size_t n = heads.size(), width = n ? values.size() / n : 0;
  return nb::make_tuple(array(std::move(keys), {n}), array(std::move(counts), {n}), array(std::move(steps), {n}),
                        array(std::move(values), {n, width}));
}

}  // namespace hotrow::bindings
