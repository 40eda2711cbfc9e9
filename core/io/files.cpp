// Error texts and helpers for any implementation of Files, and the implementation in use.
#include "io/files.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <system_error>

#include "io/system_files.h"

namespace hotrow {
namespace {

constexpr size_t kCopyBytes = size_t{1} << 20;

const char* cure(int code, const std::string& operation) {
  switch (code) {
    case 0:
      return "it was cut off by a crash or by another program; restore it from a checkpoint";
    case ENOSPC:
    case EDQUOT:
      return "free some space or point ssd= at a larger disk";
    case EROFS:
      return "mount the disk for writing or point ssd= at another folder";
    case EACCES:
    case EPERM:
      return "give this user the right to it (chown or chmod) or point ssd= at another folder";
    case EMFILE:
    case ENFILE:
      return "raise the limit of open files (ulimit -n)";
    case EIO:
      return "the disk may be failing; see dmesg and point ssd= at another disk";
    case EWOULDBLOCK:
      return operation == "lock" ? "another process uses this folder; stop it or use another folder" : "";
    default:
      return "";
  }
}

std::string describe(int code, const std::string& operation, const std::string& path) {
  std::string text = "cannot " + operation + " '" + path + "': ";
  text += code == 0 ? "the file is shorter than expected" : std::generic_category().message(code);
  const std::string help = cure(code, operation);
  return help.empty() ? text : text + "; " + help;
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Cleans up after a failed helper. Its own error is ignored: the first error is the one to report.
void remove_quietly(Files& files, const std::string& path) {
  try {
    if (files.exists(path)) files.remove(path);
  } catch (const IoError&) {
  }
}

std::mutex replacing;
std::shared_ptr<Files> replaced;       // keeps current alive; under the mutex
std::atomic<Files*> current{nullptr};  // null: the system's

}  // namespace

IoError::IoError(int code, const std::string& operation, const std::string& path)
    : std::runtime_error(describe(code, operation, path)), code_(code), path_(path) {}

void Files::copy(const std::string& from, const std::string& to) {
  const auto source = open(from, OpenMode::kRead);
  const uint64_t bytes = source->size();
  std::vector<char> chunk(std::min<uint64_t>(bytes, kCopyBytes));
  auto target = open(to, OpenMode::kCreate);
  try {
    for (uint64_t offset = 0; offset < bytes; offset += chunk.size()) {
      const size_t part = std::min<uint64_t>(chunk.size(), bytes - offset);
      source->read(offset, chunk.data(), part);
      target->write(offset, chunk.data(), part);
    }
    target->sync();
  } catch (...) {
    target.reset();
    remove_quietly(*this, to);
    throw;
  }
}

void Files::replace(const std::string& path, const void* from, size_t bytes) {
  const std::string temporary = path + ".tmp";
  if (exists(temporary)) remove(temporary);
  try {
    auto file = open(temporary, OpenMode::kCreate);
    file->write(0, from, bytes);
    file->sync();
    file.reset();
    rename(temporary, path);
  } catch (...) {
    remove_quietly(*this, temporary);
    throw;
  }
  sync_folder(folder_of(path));
}

std::vector<char> Files::read_all(const std::string& path) {
  const auto file = open(path, OpenMode::kRead);
  std::vector<char> bytes(file->size());
  file->read(0, bytes.data(), bytes.size());
  return bytes;
}

Files& files() {
  Files* replacement = current.load(std::memory_order_acquire);
  return replacement ? *replacement : system_files();
}

void set_files(std::shared_ptr<Files> replacement) {
  std::lock_guard lock(replacing);
  current.store(replacement.get(), std::memory_order_release);
  replaced.swap(replacement);  // the previous one lives until this call returns
}

}  // namespace hotrow
