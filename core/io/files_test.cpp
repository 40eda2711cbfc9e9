#include "io/files.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "io/partial_transfer.h"
#include "testing/random.h"
#include "testing/temp_folder.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::Random;
using testing::TempFolder;

std::vector<char> random_bytes(size_t count, uint64_t seed) {
  Random random(seed);
  std::vector<char> bytes(count);
  for (char& each : bytes) each = static_cast<char>(random.bits());
  return bytes;
}

void write_all(const std::string& path, const std::vector<char>& bytes) {
  files().open(path, OpenMode::kCreate)->write(0, bytes.data(), bytes.size());
}

struct Aligned {
  explicit Aligned(size_t bytes) : data(static_cast<char*>(std::aligned_alloc(kIoAlign, bytes))) {}
  ~Aligned() { std::free(data); }
  char* data;
};

// The IoError that it throws; fails the test when there is none.
template <class Fn>
IoError error_of(Fn fn) {
  try {
    fn();
  } catch (const IoError& error) {
    return error;
  }
  testing::fail(__FILE__, __LINE__, "no IoError");
  return IoError(0, "", "");
}

TEST(an_io_error_gives_the_operation_the_path_the_reason_and_the_cure) {
  CHECK_EQ(std::string(IoError(ENOSPC, "write", "/path").what()),
           "cannot write '/path': No space left on device; free some space or point ssd= at a larger disk");
  CHECK_EQ(std::string(IoError(EWOULDBLOCK, "lock", "/path").what()),
           "cannot lock '/path': Resource temporarily unavailable; another process uses this folder; stop it or use "
           "another folder");
  CHECK_EQ(std::string(IoError(ENOENT, "open", "/path").what()), "cannot open '/path': No such file or directory");
  for (int code : {0, ENOSPC, EDQUOT, EROFS, EACCES, EPERM, EMFILE, ENFILE, EIO})
    CHECK(std::strchr(IoError(code, "write", "/path").what(), ';') != nullptr);
}

TEST(a_file_is_what_was_written_to_it) {
  TempFolder folder;
  Random random(1);
  auto file = files().open(folder / "file", OpenMode::kCreate);
  CHECK_EQ(file->path(), folder / "file");
  std::vector<char> expected;
  for (int round = 0; round < 300; ++round) {
    if (random.below(20) == 0) {
      expected.resize(random.below(100000));
      file->truncate(expected.size());
    }
    const std::vector<char> bytes = random_bytes(random.below(5000), random.bits());
    const uint64_t offset = random.below(100000);
    if (!bytes.empty()) expected.resize(std::max(expected.size(), offset + bytes.size()));
    std::copy(bytes.begin(), bytes.end(), expected.begin() + static_cast<ptrdiff_t>(bytes.empty() ? 0 : offset));
    file->write(offset, bytes.data(), bytes.size());
    CHECK_EQ(file->size(), expected.size());
  }
  file->sync();
  CHECK(files().read_all(folder / "file") == expected);
}

TEST(a_direct_file_holds_the_same_bytes) {
  for (const char* parent : {"", "/dev/shm"}) {
    if (*parent && !files().exists(parent)) continue;
    TempFolder folder(*parent ? parent : std::filesystem::temp_directory_path().string());
    const std::vector<char> bytes = random_bytes(5 * kIoAlign, 2);
    Aligned memory(bytes.size());
    std::copy(bytes.begin(), bytes.end(), memory.data);
    auto file = files().open(folder / "file", OpenMode::kCreateDirect);
    file->write(0, memory.data, bytes.size());
    file->sync();
    CHECK(files().read_all(folder / "file") == bytes);
    std::fill(memory.data, memory.data + bytes.size(), 0);
    files().open(folder / "file", OpenMode::kReadDirect)->read(kIoAlign, memory.data, 3 * kIoAlign);
    CHECK(std::equal(memory.data, memory.data + 3 * kIoAlign, bytes.begin() + kIoAlign));
  }
}

TEST(a_file_system_without_direct_io_is_read_through_the_cache) {
  char start[6] = {};
  files().open("/proc/version", OpenMode::kReadDirect)->read(0, start, 5);
  CHECK_EQ(std::string(start), "Linux");
}

TEST(a_read_past_the_end_says_that_the_file_is_short) {
  TempFolder folder;
  write_all(folder / "file", random_bytes(5000, 3));
  Aligned memory(4 * kIoAlign);
  for (OpenMode mode : {OpenMode::kRead, OpenMode::kReadDirect}) {
    auto file = files().open(folder / "file", mode);
    for (uint64_t offset : {uint64_t{0}, uint64_t{4096}, uint64_t{8192}, uint64_t{1} << 40}) {
      const IoError error = error_of([&] { file->read(offset, memory.data, 2 * kIoAlign); });
      CHECK_EQ(error.code(), 0);
      CHECK_EQ(error.path(), folder / "file");
      CHECK(std::strstr(error.what(), "shorter than expected") != nullptr);
    }
    file->read(5000, memory.data, 0);
  }
}

TEST(the_rest_of_a_transfer_starts_at_a_border_where_that_is_progress) {
  CHECK_EQ(retry_offset(0, 0, 5000), 4096u);
  CHECK_EQ(retry_offset(0, 4096, 5000), 5000u);
  CHECK_EQ(retry_offset(0, 0, 8192), 8192u);
  CHECK_EQ(retry_offset(0, 0, 10), 10u);
  CHECK_EQ(retry_offset(100, 0, 5000), 3996u);
  CHECK_EQ(retry_offset(4096, 0, 4097), 4096u);
}

TEST(a_write_that_stops_half_way_throws_and_leaves_its_start) {
  TempFolder folder;
  const std::vector<char> bytes = random_bytes(20000, 4);
  auto file = files().open(folder / "file", OpenMode::kCreate);
  rlimit before;
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{10000, before.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &small);
  const IoError error = error_of([&] { file->write(0, bytes.data(), bytes.size()); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  CHECK_EQ(error.code(), EFBIG);
  const std::vector<char> left = files().read_all(folder / "file");
  CHECK_EQ(left.size(), 10000u);
  CHECK(std::equal(left.begin(), left.end(), bytes.begin()));
}

TEST(creating_never_overwrites_and_reading_never_creates) {
  TempFolder folder;
  write_all(folder / "file", {'a'});
  for (OpenMode mode : {OpenMode::kCreate, OpenMode::kCreateDirect})
    CHECK_EQ(error_of([&] { files().open(folder / "file", mode); }).code(), EEXIST);
  for (OpenMode mode : {OpenMode::kRead, OpenMode::kReadDirect})
    CHECK_EQ(error_of([&] { files().open(folder / "none", mode); }).code(), ENOENT);
  CHECK(!files().exists(folder / "none"));
  CHECK(!files().exists(folder / "file/below"));
  CHECK_EQ(files().read_all(folder / "file").size(), 1u);
}

TEST(a_file_for_reading_cannot_be_written) {
  TempFolder folder;
  write_all(folder / "file", {'a'});
  auto file = files().open(folder / "file", OpenMode::kRead);
  CHECK_EQ(error_of([&] { file->write(0, "b", 1); }).code(), EBADF);
  CHECK(files().read_all(folder / "file") == std::vector<char>{'a'});
}

TEST(folders_are_made_with_their_parents_and_removed_with_their_contents) {
  TempFolder folder;
  for (int twice = 0; twice < 2; ++twice) files().make_folder(folder / "a/b//c/");
  for (const char* name : {"a/z", "a/y", "a/b/c/x"}) write_all(folder / name, {});
  CHECK(files().list(folder / "a") == (std::vector<std::string>{"b", "y", "z"}));
  CHECK(files().list(folder / "a/b/c") == std::vector<std::string>{"x"});
  CHECK_EQ(error_of([&] { files().make_folder(folder / "a/y/below"); }).path(), folder / "a/y");
  CHECK_EQ(error_of([&] { files().list(folder / "none"); }).code(), ENOENT);
  CHECK_EQ(error_of([&] { files().remove(folder / "none"); }).code(), ENOENT);
  files().sync_folder(folder / "a");
  CHECK_EQ(error_of([&] { files().sync_folder(folder / "none"); }).code(), ENOENT);
  files().remove(folder / "a/z");
  files().remove_folder(folder / "a");
  files().remove_folder(folder / "a");
  CHECK(files().list(folder.path()).empty());
}

TEST(renaming_takes_the_place_of_what_was_there) {
  TempFolder folder;
  write_all(folder / "from", {'f'});
  write_all(folder / "to", {'t'});
  files().rename(folder / "from", folder / "to");
  CHECK(files().list(folder.path()) == std::vector<std::string>{"to"});
  CHECK(files().read_all(folder / "to") == std::vector<char>{'f'});
  const IoError error = error_of([&] { files().rename(folder / "from", folder / "to"); });
  CHECK_EQ(std::string(error.what()),
           "cannot rename '" + folder / "from" + "' to '" + folder / "to" + "': No such file or directory");
}

TEST(a_link_is_the_same_file_and_another_disk_has_none) {
  TempFolder folder;
  write_all(folder / "from", {'f'});
  CHECK(files().link(folder / "from", folder / "to"));
  files().remove(folder / "from");
  CHECK(files().read_all(folder / "to") == std::vector<char>{'f'});
  CHECK_EQ(error_of([&] { files().link(folder / "from", folder / "other"); }).code(), ENOENT);
  struct stat here, there;
  if (::stat("/dev/shm", &there) != 0 || ::stat(folder.path().c_str(), &here) != 0 || here.st_dev == there.st_dev)
    return;
  TempFolder elsewhere("/dev/shm");
  CHECK(!files().link(folder / "to", elsewhere / "to"));
  CHECK(files().list(elsewhere.path()).empty());
}

TEST(a_copy_is_equal_and_never_overwrites) {
  TempFolder folder;
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{1} << 20, (size_t{5} << 19) + 7}) {
    const std::string from = folder / ("from" + std::to_string(bytes)), to = from + ".copy";
    const std::vector<char> content = random_bytes(bytes, bytes);
    write_all(from, content);
    files().copy(from, to);
    CHECK(files().read_all(to) == content);
    CHECK_EQ(error_of([&] { files().copy(from, to); }).code(), EEXIST);
    CHECK(files().exists(to));
  }
}

TEST(replacing_leaves_only_the_new_bytes) {
  TempFolder folder;
  const std::vector<char> content = random_bytes(100000, 5);
  files().replace(folder / "file", content.data(), content.size());
  CHECK(files().read_all(folder / "file") == content);
  write_all(folder / "file.tmp", {'l', 'e', 'f', 't'});  // by a crash
  files().replace(folder / "file", "", 0);
  CHECK(files().read_all(folder / "file").empty());
  CHECK(files().list(folder.path()) == std::vector<std::string>{"file"});
  CHECK_EQ(error_of([&] { files().replace(folder / "none/file", "", 0); }).code(), ENOENT);
}

// Whether a child process gets the lock. The child exits with the lock held.
bool child_can_lock(const std::string& folder) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      const auto lock = files().lock(folder);
      ::_exit(0);
    } catch (const IoError& error) {
      ::_exit(error.code() == EWOULDBLOCK ? 1 : 2);
    }
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) < 2);
  return status == 0;
}

TEST(a_folder_is_locked_once_by_anyone_until_the_lock_is_gone) {
  TempFolder folder;
  auto lock = files().lock(folder.path());
  const IoError error = error_of([&] { files().lock(folder.path()); });
  CHECK_EQ(error.code(), EWOULDBLOCK);
  CHECK_EQ(error.path(), folder.path());
  CHECK(!child_can_lock(folder.path()));
  lock.reset();
  CHECK(child_can_lock(folder.path()));
  lock = files().lock(folder.path());  // the child exited with the lock held
  CHECK_EQ(error_of([&] { files().lock(folder / "none"); }).code(), ENOENT);
}

TEST(a_child_that_was_forked_under_a_lock_does_not_keep_it) {
  TempFolder folder;
  auto lock = files().lock(folder.path());
  int done[2];
  CHECK_EQ(::pipe(done), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(done[1]);
    char byte;
    ::_exit(::read(done[0], &byte, 1) == 0 ? 0 : 1);
  }
  lock.reset();
  lock = files().lock(folder.path());
  ::close(done[1]);
  ::close(done[0]);
  ::waitpid(child, nullptr, 0);
}

TEST(a_descriptor_is_not_inherited_by_a_started_program) {
  TempFolder folder;
  auto file = files().open(folder / "file", OpenMode::kCreate);
  CHECK(::fcntl(file->descriptor(), F_GETFD) & FD_CLOEXEC);
}

}  // namespace
}  // namespace hotrow
