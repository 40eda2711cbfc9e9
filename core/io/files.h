// File access for the log and the checkpoints: whole reads and writes at an offset, and the calls that make a change
// durable and atomic. All files that HotRow writes go through this interface.
//
// The implementation is replaceable: testing/faulty_files.h makes each single call fail once. A call that fails throws
// IoError with the operation, the path, the system's reason and a cure where there is one.
//
// Threads: reads and writes of one File may run concurrently. The caller orders everything else.
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
  int code() const { return code_; }  // errno; 0: unexpected end of file
  const std::string& path() const { return path_; }

 private:
  int code_;
  std::string path_;
};

// Direct I/O bypasses the page cache and needs addresses, offsets and sizes in units of this.
inline constexpr size_t kIoAlign = 4096;

enum class OpenMode {
  kRead,          // must exist
  kReadDirect,    // the same, with direct I/O if the file system supports it
  kCreate,        // must not exist
  kCreateDirect,  // the same, with direct I/O if the file system supports it
};
inline bool creates(OpenMode mode) { return mode == OpenMode::kCreate || mode == OpenMode::kCreateDirect; }
inline bool is_direct(OpenMode mode) { return mode == OpenMode::kReadDirect || mode == OpenMode::kCreateDirect; }

class File {
 public:
  virtual ~File() = default;
  // Transfer all bytes or throw IoError.
  virtual void read(uint64_t offset, void* into, size_t bytes) const = 0;
  virtual void write(uint64_t offset, const void* from, size_t bytes) = 0;
  virtual void truncate(uint64_t bytes) = 0;
  virtual void sync() = 0;  // data and size are on the disk afterwards
  virtual uint64_t size() const = 0;
  virtual int descriptor() const = 0;
  virtual const std::string& path() const = 0;
};

// Locked while it lives; the system releases it when the process dies.
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
  virtual void remove_folder(const std::string& path) = 0;  // with its contents; it may be missing
  // Makes a hard link; false: on another disk, or the file system has no hard links.
  virtual bool link(const std::string& from, const std::string& to) = 0;
  virtual void sync_folder(const std::string& path) = 0;  // makes its names durable
  // Throws IoError with EWOULDBLOCK when another process (or this one) holds it.
  virtual std::unique_ptr<FolderLock> lock(const std::string& folder) = 0;
  // Whether reads may use the descriptor instead of File::read() (reader.h).
  virtual bool supports_descriptor_reads() const { return true; }

  // Helpers over the calls above.
  // `to` must not exist. Its bytes are on the disk afterwards; its name is after sync_folder, as with link().
  void copy(const std::string& from, const std::string& to);
  // Atomically replaces a file: path holds its old bytes or all new ones, whatever happens (temporary file, sync,
  // rename, folder sync). A crash may leave the temporary, path + ".tmp"; the next replace removes it.
  void replace(const std::string& path, const void* from, size_t bytes);
  std::vector<char> read_all(const std::string& path);
};

// The system's files, or the replacement that a test installed.
Files& files();
void set_files(std::shared_ptr<Files> replacement);  // null: the system's again

}  // namespace hotrow
