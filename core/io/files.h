// Files, as the log and the checkpoints need them: whole reads and writes at an offset, and the few calls that make a
// change durable and atomic. Everything that this project keeps on disk goes through here.
//
// It is replaceable (faults.h): a test makes every single call fail once and looks at what is left. A call that fails
// throws IoError with the operation, the path, the system's reason and a cure where there is one.
//
// Threads: a File's reads and writes may run beside each other; everything else is the caller's to order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace hotrow {

class IoError : public std::runtime_error {
 public:
  IoError(int code, const std::string& operation, const std::string& path);
  int code() const { return code_; }  // errno; 0 for an end of file that came too early
  const std::string& path() const { return path_; }

 private:
  int code_;
  std::string path_;
};

// Direct I/O (past the page cache) wants addresses, offsets and sizes in units of this.
inline constexpr size_t kIoAlign = 4096;

enum class OpenMode {
  kRead,          // must exist
  kReadDirect,    // the same, past the page cache where the file system can
  kCreate,        // must not exist
  kCreateDirect,  // the same, past the page cache where the file system can
};
inline bool creates(OpenMode mode) { return mode == OpenMode::kCreate || mode == OpenMode::kCreateDirect; }
inline bool is_direct(OpenMode mode) { return mode == OpenMode::kReadDirect || mode == OpenMode::kCreateDirect; }

class File {
 public:
  virtual ~File() = default;
  // All or an IoError.
  virtual void read(uint64_t offset, void* into, size_t bytes) const = 0;
  virtual void write(uint64_t offset, const void* from, size_t bytes) = 0;
  virtual void truncate(uint64_t bytes) = 0;
  virtual void sync() = 0;  // data and size are on the disk afterwards
  virtual uint64_t size() const = 0;
  virtual int descriptor() const = 0;
  virtual const std::string& path() const = 0;
};

// Held for as long as it lives; the system drops it when the process dies.
class FolderLock {
 public:
  virtual ~FolderLock() = default;
};

class Files {
 public:
  virtual ~Files() = default;
  virtual std::unique_ptr<File> open(const std::string& path, OpenMode mode) = 0;
  virtual bool exists(const std::string& path) = 0;
  virtual std::vector<std::string> list(const std::string& folder) = 0;  // names in a folder, sorted
  virtual void make_folder(const std::string& path) = 0;                 // with its parents, durably; it may exist
  virtual void rename(const std::string& from, const std::string& to) = 0;
  virtual void remove(const std::string& path) = 0;         // a file
  virtual void remove_folder(const std::string& path) = 0;  // and all that is in it; it may be missing
  // A hard link; false: on another disk, or the file system has none.
  virtual bool link(const std::string& from, const std::string& to) = 0;
  virtual void sync_folder(const std::string& path) = 0;  // its names are on the disk afterwards
  // Throws IoError with EWOULDBLOCK when another process (or this one) holds it.
  virtual std::unique_ptr<FolderLock> lock(const std::string& folder) = 0;
  // Whether reads may go around File::read(), straight to its descriptor (reader.h).
  virtual bool plain() const { return true; }

  // Helpers over the calls above.
  // `to` must not exist. Its bytes are on the disk afterwards; its name is after sync_folder, as with link().
  void copy(const std::string& from, const std::string& to);
  // path holds either what it held before or all of `bytes`, whatever happens: a temporary, sync, rename, folder sync.
  // A crash may leave the temporary, path + ".tmp"; the next replace takes it away.
  void replace(const std::string& path, const void* from, size_t bytes);
  std::vector<char> read_all(const std::string& path);
};

// The system's files, or what a test has put in their place.
Files& files();
void set_files(std::shared_ptr<Files> replacement);  // null: the system's again

}  // namespace hotrow
