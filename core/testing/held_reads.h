// Files whose reads wait on request: tests decide how long a row on SSD takes.
//
//   WithHeldReads disk;
//   disk.hold();      // reads wait from now on
//   disk.let_go();
//
// Writes and other calls are not delayed. Threads: any.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "io/files.h"

namespace hotrow::testing {

class HeldFiles : public Files {
 public:
  explicit HeldFiles(Files& under) : under_(under), gate_(std::make_shared<Gate>()) {}
  void hold(bool held) {
    {
      const std::lock_guard lock(gate_->mutex);
      gate_->held = held;
    }
    gate_->changed.notify_all();
  }
  // Reads that wait now.
  int waiting() const {
    const std::lock_guard lock(gate_->mutex);
    return gate_->waiting;
  }

  std::unique_ptr<File> open(const std::string& path, OpenMode mode) override {
    return std::make_unique<HeldFile>(under_.open(path, mode), gate_);
  }
  bool exists(const std::string& path) override { return under_.exists(path); }
  std::vector<std::string> list(const std::string& folder) override { return under_.list(folder); }
  void make_folder(const std::string& path) override { under_.make_folder(path); }
  void rename(const std::string& from, const std::string& to) override { under_.rename(from, to); }
  void remove(const std::string& path) override { under_.remove(path); }
  void remove_folder(const std::string& path) override { under_.remove_folder(path); }
  bool link(const std::string& from, const std::string& to) override { return under_.link(from, to); }
  void sync_folder(const std::string& path) override { under_.sync_folder(path); }
  std::unique_ptr<FolderLock> lock(const std::string& folder) override { return under_.lock(folder); }
  bool supports_descriptor_reads() const override { return false; }

 private:
  struct Gate {  // shared with the File objects, which may outlive the Files
    std::mutex mutex;
    std::condition_variable changed;
    bool held = false;
    int waiting = 0;
  };
  class HeldFile : public File {
   public:
    HeldFile(std::unique_ptr<File> under, std::shared_ptr<Gate> gate)
        : under_(std::move(under)), gate_(std::move(gate)) {}
    void read(uint64_t offset, void* into, size_t bytes) const override {
      {
        std::unique_lock lock(gate_->mutex);
        ++gate_->waiting;
        gate_->changed.wait(lock, [this] { return !gate_->held; });
        --gate_->waiting;
      }
      under_->read(offset, into, bytes);
    }
    void write(uint64_t offset, const void* from, size_t bytes) override { under_->write(offset, from, bytes); }
    void truncate(uint64_t bytes) override { under_->truncate(bytes); }
    void sync() override { under_->sync(); }
    uint64_t size() const override { return under_->size(); }
    int descriptor() const override { return under_->descriptor(); }
    const std::string& path() const override { return under_->path(); }

   private:
    std::unique_ptr<File> under_;
    std::shared_ptr<Gate> gate_;
  };
  Files& under_;
  std::shared_ptr<Gate> gate_;
};

// Replaces files() while it lives.
class WithHeldReads {
 public:
  WithHeldReads() : files_(std::make_shared<HeldFiles>(files())) { set_files(files_); }
  ~WithHeldReads() {
    let_go();
    set_files(nullptr);
  }
  WithHeldReads(const WithHeldReads&) = delete;
  WithHeldReads& operator=(const WithHeldReads&) = delete;
  void hold() { files_->hold(true); }
  void let_go() { files_->hold(false); }
  int waiting() const { return files_->waiting(); }

 private:
  std::shared_ptr<HeldFiles> files_;
};

}  // namespace hotrow::testing
