#include "testing/faulty_files.h"

#include <limits>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "hash/hash.h"
#include "io/system_files.h"

namespace hotrow {

// The numbering of the calls, and which of them fail.
class FaultyFiles::Faults {
 public:
  enum Kind { kReads, kChanges };

  void fail(uint64_t at, int code, bool repeat) {
    if (at == 0) throw std::invalid_argument("at must be 1 or more; 1 is the next call");
    std::lock_guard lock(mutex_);
    at_ = calls_ + at;
    code_ = code;
    repeat_ = repeat;
  }

  void heal() { fail(kNever, 0, false); }

  // The number of this call, and the errno that it must fail with or 0.
  std::pair<uint64_t, int> count(Kind kind, const std::string& operation, const std::string& path) {
    std::lock_guard lock(mutex_);
    ++calls_;
    operation_ = operation;
    path_ = path;
    const bool fails = calls_ == at_ || (repeat_ && calls_ > at_ && kind == kChanges);
    return {calls_, fails ? code_ : 0};
  }

  void pass(Kind kind, const std::string& operation, const std::string& path) {
    if (const int code = count(kind, operation, path).second) throw IoError(code, operation, path);
  }

  uint64_t calls() const {
    std::lock_guard lock(mutex_);
    return calls_;
  }

  std::string last() const {
    std::lock_guard lock(mutex_);
    return calls_ == 0 ? "none" : operation_ + " '" + path_ + "'";
  }

 private:
  static constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max() / 2;

  mutable std::mutex mutex_;
  uint64_t calls_ = 0;
  uint64_t at_ = kNever;
  int code_ = 0;
  bool repeat_ = false;
  std::string operation_, path_;
};

namespace {

using Faults = FaultyFiles::Faults;

// A quarter of the torn writes leave nothing and a quarter leave everything, because these limits are the likeliest to
// break recovery.
size_t torn_bytes(uint64_t call, size_t bytes, bool direct) {
  const uint64_t bits = mix64(call + kGolden);
  if (bits % 4 == 0) return 0;
  if (bits % 4 == 1) return bytes;
  const size_t prefix = static_cast<size_t>((bits >> 2) % (bytes + 1));
  return direct ? prefix / kIoAlign * kIoAlign : prefix;
}

class FaultyFile : public File {
 public:
  FaultyFile(std::unique_ptr<File> under, std::shared_ptr<Faults> faults, bool direct)
      : under_(std::move(under)), faults_(std::move(faults)), direct_(direct) {}

  void read(uint64_t offset, void* into, size_t bytes) const override {
    faults_->pass(Faults::kReads, "read", path());
    under_->read(offset, into, bytes);
  }

  void write(uint64_t offset, const void* from, size_t bytes) override {
    const auto [call, code] = faults_->count(Faults::kChanges, "write", path());
    if (code == 0) return under_->write(offset, from, bytes);
    try {
      under_->write(offset, from, torn_bytes(call, bytes, direct_));
    } catch (const IoError&) {
    }
    throw IoError(code, "write", path());
  }

  void truncate(uint64_t bytes) override {
    faults_->pass(Faults::kChanges, "truncate", path());
    under_->truncate(bytes);
  }

  void sync() override {
    faults_->pass(Faults::kChanges, "sync", path());
    under_->sync();
  }

  uint64_t size() const override { return under_->size(); }
  int descriptor() const override { return under_->descriptor(); }
  const std::string& path() const override { return under_->path(); }

 private:
  std::unique_ptr<File> under_;
  std::shared_ptr<Faults> faults_;
  bool direct_;
};

}  // namespace

FaultyFiles::FaultyFiles(Files& under) : under_(under), faults_(std::make_shared<Faults>()) {}
FaultyFiles::~FaultyFiles() = default;

void FaultyFiles::fail(uint64_t at, int code, bool repeat) { faults_->fail(at, code, repeat); }
void FaultyFiles::heal() { faults_->heal(); }
uint64_t FaultyFiles::calls() const { return faults_->calls(); }
std::string FaultyFiles::last() const { return faults_->last(); }

std::unique_ptr<File> FaultyFiles::open(const std::string& path, OpenMode mode) {
  creates(mode) ? faults_->pass(Faults::kChanges, "create", path) : faults_->pass(Faults::kReads, "open", path);
  return std::make_unique<FaultyFile>(under_.open(path, mode), faults_, is_direct(mode));
}

bool FaultyFiles::exists(const std::string& path) { return under_.exists(path); }

std::vector<std::string> FaultyFiles::list(const std::string& folder) {
  faults_->pass(Faults::kReads, "list", folder);
  return under_.list(folder);
}

void FaultyFiles::make_folder(const std::string& path) {
  faults_->pass(Faults::kChanges, "make folder", path);
  under_.make_folder(path);
}

void FaultyFiles::rename(const std::string& from, const std::string& to) {
  faults_->pass(Faults::kChanges, "rename '" + from + "' to", to);
  under_.rename(from, to);
}

void FaultyFiles::remove(const std::string& path) {
  faults_->pass(Faults::kChanges, "remove", path);
  under_.remove(path);
}

void FaultyFiles::remove_folder(const std::string& path) {
  faults_->pass(Faults::kChanges, "remove", path);
  under_.remove_folder(path);
}

bool FaultyFiles::link(const std::string& from, const std::string& to) {
  faults_->pass(Faults::kChanges, "link '" + from + "' as", to);
  return under_.link(from, to);
}

void FaultyFiles::sync_folder(const std::string& path) {
  faults_->pass(Faults::kChanges, "sync", path);
  under_.sync_folder(path);
}

std::unique_ptr<FolderLock> FaultyFiles::lock(const std::string& folder) {
  faults_->pass(Faults::kChanges, "lock", folder);
  return under_.lock(folder);
}

WithFaults::WithFaults() : files_(std::make_shared<FaultyFiles>(system_files())) { set_files(files_); }

}  // namespace hotrow
