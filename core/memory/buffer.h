// A scratch array that keeps its memory between batches and never clears it.
#pragma once

#include <cstddef>
#include <memory>

namespace hotrow {

template <class T>
class Buffer {
 public:
  // Contents are undefined after a call that grows.
  T* resize(size_t size) {
    if (size > capacity_) {
      capacity_ = size + size / 4;
      data_.reset(new T[capacity_]);
    }
    size_ = size;
    return data_.get();
  }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  size_t size() const { return size_; }
  size_t bytes() const { return capacity_ * sizeof(T); }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }

 private:
  std::unique_ptr<T[]> data_;
  size_t size_ = 0, capacity_ = 0;
};

}  // namespace hotrow
