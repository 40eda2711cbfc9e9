// Files by POSIX calls. Partial reads and writes are continued, and calls that a signal interrupts are repeated.
// Descriptors are close-on-exec.
//
// Direct I/O is requested after the open and not by it: on a file system without O_DIRECT, an open with O_CREAT fails
// with EINVAL and leaves the file behind on some kernels. If direct I/O is refused, the file uses the page cache.
#include "io/system_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>

#include "io/descriptor.h"
#include "io/partial_transfer.h"

namespace hotrow {
namespace {

template <class Call>
auto uninterrupted(Call call) {
  while (true) {
    const auto result = call();
    if (result != -1 || errno != EINTR) return result;
  }
}

void require(bool good, const std::string& operation, const std::string& path) {
  if (!good) throw IoError(errno, operation, path);
}

Descriptor open_descriptor(const std::string& path, int flags, const char* operation) {
  Descriptor result(uninterrupted([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0644); }));
  require(result.get() >= 0, operation, path);
  return result;
}

void bypass_page_cache([[maybe_unused]] int descriptor) {
#ifdef O_DIRECT
  const int flags = ::fcntl(descriptor, F_GETFL);
  if (flags >= 0) (void)::fcntl(descriptor, F_SETFL, flags | O_DIRECT);
#endif
}

class SystemFile : public File {
 public:
  SystemFile(std::string path, Descriptor descriptor) : path_(std::move(path)), descriptor_(std::move(descriptor)) {}

  void read(uint64_t offset, void* into, size_t bytes) const override {
    for (size_t done = 0; done < bytes;) {
      char* const at = static_cast<char*>(into) + done;
      const ssize_t got = uninterrupted([&] { return ::pread(descriptor(), at, bytes - done, to_off(offset + done)); });
      require(got >= 0, "read", path_);
      const size_t reached = done + static_cast<size_t>(got);
      if (reached == bytes) return;
      if (got == 0 || ends_before(descriptor(), offset + reached)) throw IoError(0, "read", path_);
      done = retry_offset(offset, done, reached);
    }
  }

  void write(uint64_t offset, const void* from, size_t bytes) override {
    for (size_t done = 0; done < bytes;) {
      const char* const at = static_cast<const char*>(from) + done;
      const ssize_t put =
          uninterrupted([&] { return ::pwrite(descriptor(), at, bytes - done, to_off(offset + done)); });
      require(put >= 0, "write", path_);
      if (put == 0) throw IoError(EIO, "write", path_);
      const size_t reached = done + static_cast<size_t>(put);
      if (reached == bytes) return;
      done = retry_offset(offset, done, reached);
    }
  }

  void truncate(uint64_t bytes) override {
    require(uninterrupted([&] { return ::ftruncate(descriptor(), to_off(bytes)); }) == 0, "truncate", path_);
  }

  void sync() override {
    require(uninterrupted([&] { return ::fdatasync(descriptor()); }) == 0, "sync", path_);
  }

  uint64_t size() const override {
    struct stat info;
    require(::fstat(descriptor(), &info) == 0, "look at", path_);
    return static_cast<uint64_t>(info.st_size);
  }

  int descriptor() const override { return descriptor_.get(); }
  const std::string& path() const override { return path_; }

 private:
  static off_t to_off(uint64_t offset) { return static_cast<off_t>(offset); }

  std::string path_;
  Descriptor descriptor_;
};

class SystemLock : public FolderLock {
 public:
  explicit SystemLock(Descriptor descriptor) : descriptor_(std::move(descriptor)) {}
  // Closing is not enough: a child that was forked in the meantime shares the lock and would keep it.
  ~SystemLock() override { ::flock(descriptor_.get(), LOCK_UN); }

 private:
  Descriptor descriptor_;
};

class SystemFiles : public Files {
 public:
  std::unique_ptr<File> open(const std::string& path, OpenMode mode) override {
    const int flags = creates(mode) ? O_RDWR | O_CREAT | O_EXCL : O_RDONLY;
    Descriptor descriptor = open_descriptor(path, flags, creates(mode) ? "create" : "open");
    if (is_direct(mode)) bypass_page_cache(descriptor.get());
    return std::make_unique<SystemFile>(path, std::move(descriptor));
  }

  bool exists(const std::string& path) override {
    struct stat info;
    if (::stat(path.c_str(), &info) == 0) return true;
    require(errno == ENOENT || errno == ENOTDIR, "look at", path);
    return false;
  }

  std::vector<std::string> list(const std::string& folder) override {
    const std::unique_ptr<DIR, int (*)(DIR*)> opened(::opendir(folder.c_str()), ::closedir);
    require(opened != nullptr, "list", folder);
    std::vector<std::string> names;
    while (errno = 0, true) {
      const dirent* entry = ::readdir(opened.get());
      if (!entry) break;
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    require(errno == 0, "list", folder);
    std::sort(names.begin(), names.end());
    return names;
  }

  void make_folder(const std::string& path) override {
    for (size_t slash = path.find('/', 1);; slash = path.find('/', slash + 1)) {
      make_one_folder(path.substr(0, slash));
      if (slash == std::string::npos) return;
    }
  }

  void rename(const std::string& from, const std::string& to) override {
    require(::rename(from.c_str(), to.c_str()) == 0, "rename '" + from + "' to", to);
  }

  void remove(const std::string& path) override { require(::unlink(path.c_str()) == 0, "remove", path); }

  void remove_folder(const std::string& path) override {
    std::error_code error;
    std::filesystem::remove_all(path, error);
    if (error) throw IoError(error.value(), "remove", path);
  }

  bool link(const std::string& from, const std::string& to) override {
    if (::link(from.c_str(), to.c_str()) == 0) return true;
    const bool cannot = errno == EXDEV || errno == EPERM || errno == ENOTSUP || errno == EMLINK || errno == ENOSYS;
    require(cannot, "link '" + from + "' as", to);
    return false;
  }

  void sync_folder(const std::string& path) override {
    const Descriptor folder = open_descriptor(path, O_RDONLY | O_DIRECTORY, "sync");
    if (uninterrupted([&] { return ::fsync(folder.get()); }) == 0) return;
    // Some network file systems cannot sync folders: either names are durable without it, or nothing makes them
    // durable.
    require(errno == EINVAL || errno == ENOTSUP, "sync", path);
  }

  std::unique_ptr<FolderLock> lock(const std::string& folder) override {
    Descriptor descriptor = open_descriptor(folder + "/LOCK", O_RDWR | O_CREAT, "lock");
    require(uninterrupted([&] { return ::flock(descriptor.get(), LOCK_EX | LOCK_NB); }) == 0, "lock", folder);
    return std::make_unique<SystemLock>(std::move(descriptor));
  }

 private:
  void make_one_folder(const std::string& path) {
    if (::mkdir(path.c_str(), 0755) == 0) {
      const std::string parent = std::filesystem::path(path).parent_path().string();
      return sync_folder(parent.empty() ? "." : parent);
    }
    const int code = errno;  // not always EEXIST: a read-only disk refuses even a folder that exists
    struct stat info;
    if (::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) return;
    throw IoError(code, "make folder", path);
  }
};

}  // namespace

Files& system_files() {
  static SystemFiles* const files = new SystemFiles;  // never destroyed: static objects may close files at the end
  return *files;
}

}  // namespace hotrow
