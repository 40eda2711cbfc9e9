// Files that fail on request: tests make every single call fail once and check what is left.
//
//   WithFaults disk;                             // files() is faulty until the end of the scope
//   disk->fail(3, ENOSPC);                       // the third call from now finds the disk full
//   CHECK_THROWS(IoError, store.flush());
//
// Counted calls: open, read, write, truncate, sync, list, make_folder, rename, remove, remove_folder, link, sync_folder
// and lock, on the Files object and on each File from it. exists(), size() and closing are not counted and never fail.
// A call that fails does nothing, except that a write is torn: a prefix of its bytes, from none to all, is in the file.
// The same numbers give the same prefix in every run.
//
// Threads: any.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/files.h"

namespace hotrow {

class FaultyFiles : public Files {
 public:
  // Requires: `under` lives as long as this and every File from it.
  explicit FaultyFiles(Files& under);
  ~FaultyFiles() override;

  // The at-th call from now (1: the next) throws IoError with this errno. With `repeat`, so does every later call that
  // changes the disk (all but list, reads and opening to read), as if the disk were full or gone. Replaces an earlier
  // fail().
  void fail(uint64_t at, int code, bool repeat = false);
  void heal();  // cancels fail()
  uint64_t calls() const;
  std::string last() const;  // the last call, such as "write '/tmp/a/log.3'"

  std::unique_ptr<File> open(const std::string& path, OpenMode mode) override;
  bool exists(const std::string& path) override;
  std::vector<std::string> list(const std::string& folder) override;
  void make_folder(const std::string& path) override;
  void rename(const std::string& from, const std::string& to) override;
  void remove(const std::string& path) override;
  void remove_folder(const std::string& path) override;
  bool link(const std::string& from, const std::string& to) override;
  void sync_folder(const std::string& path) override;
  std::unique_ptr<FolderLock> lock(const std::string& folder) override;
  bool supports_descriptor_reads() const override { return false; }

  class Faults;

 private:
  Files& under_;
  std::shared_ptr<Faults> faults_;  // shared with the File objects, which may outlive this
};

// Replaces files() by faulty files while it lives.
class WithFaults {
 public:
  WithFaults();
  ~WithFaults() { set_files(nullptr); }
  WithFaults(const WithFaults&) = delete;
  WithFaults& operator=(const WithFaults&) = delete;
  FaultyFiles* operator->() const { return files_.get(); }
  FaultyFiles& operator*() const { return *files_; }

 private:
  std::shared_ptr<FaultyFiles> files_;
};

}  // namespace hotrow
