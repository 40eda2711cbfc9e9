#include "testing/faulty_files.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>

#include "io/system_files.h"
#include "testing/temp_folder.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::TempFolder;

// The errno of the IoError that it throws, 0 without one.
template <class Fn>
int code_of(Fn fn) {
  try {
    fn();
  } catch (const IoError& error) {
    return error.code();
  }
  return 0;
}

// One call of each kind, in a folder that has nothing yet.
std::vector<std::string> call_everything(const std::string& folder, FaultyFiles& disk) {
  std::vector<std::string> calls;
  const auto note = [&] { calls.push_back(disk.last().substr(0, disk.last().find(' '))); };
  char byte = 'a';
  files().make_folder(folder + "/a"), note();
  auto file = files().open(folder + "/a/file", OpenMode::kCreate);
  note();
  file->write(0, &byte, 1), note();
  file->read(0, &byte, 1), note();
  file->sync(), note();
  file->truncate(0), note();
  files().open(folder + "/a/file", OpenMode::kRead), note();
  files().link(folder + "/a/file", folder + "/a/link"), note();
  files().rename(folder + "/a/file", folder + "/a/other"), note();
  files().remove(folder + "/a/link"), note();
  files().list(folder + "/a"), note();
  files().sync_folder(folder + "/a"), note();
  files().lock(folder + "/a"), note();
  files().remove_folder(folder + "/a"), note();
  return calls;
}

TEST(every_kind_of_call_is_counted_and_named) {
  TempFolder folder;
  WithFaults disk;
  CHECK_EQ(disk->last(), "none");
  const std::vector<std::string> expected{"make", "create", "write",  "read", "sync", "truncate", "open",
                                          "link", "rename", "remove", "list", "sync", "lock",     "remove"};
  CHECK(call_everything(folder.path(), *disk) == expected);
  CHECK_EQ(disk->calls(), expected.size());
  CHECK_EQ(disk->last(), "remove '" + folder / "a" + "'");
  (void)files().exists(folder / "a");
  CHECK_EQ(disk->calls(), expected.size());
}

TEST(every_call_fails_when_told_to_and_only_that_one) {
  for (uint64_t at = 1; at <= 14; ++at) {
    TempFolder folder;
    WithFaults disk;
    disk->fail(at, EIO);
    CHECK_EQ(code_of([&] { call_everything(folder.path(), *disk); }), EIO);
    CHECK_EQ(disk->calls(), at);
    system_files().remove_folder(folder / "a");
    CHECK_EQ(code_of([&] { call_everything(folder.path(), *disk); }), 0);
  }
}

TEST(a_call_that_fails_does_nothing) {
  TempFolder folder;
  WithFaults disk;
  const auto failing = [&](auto call) {
    disk->fail(1, EIO);
    CHECK_EQ(code_of(call), EIO);
  };
  files().replace(folder / "file", "abc", 3);
  failing([&] { files().remove(folder / "file"); });
  failing([&] { files().rename(folder / "file", folder / "other"); });
  failing([&] { files().link(folder / "file", folder / "other"); });
  failing([&] { files().make_folder(folder / "other"); });
  failing([&] { files().open(folder / "other", OpenMode::kCreate); });
  failing([&] { files().lock(folder.path()); });
  failing([&] { files().remove_folder(folder.path()); });
  CHECK(files().list(folder.path()) == std::vector<std::string>{"file"});
  CHECK_EQ(files().read_all(folder / "file").size(), 3u);
}

TEST(with_repeat_the_disk_can_be_read_but_never_changed_again) {
  TempFolder folder;
  files().replace(folder / "file", "abc", 3);
  WithFaults disk;
  disk->fail(2, ENOSPC, /*repeat=*/true);
  files().make_folder(folder / "a");
  for (int i = 0; i < 3; ++i) {
    CHECK_EQ(code_of([&] { files().make_folder(folder / "b"); }), ENOSPC);
    CHECK_EQ(code_of([&] { files().open(folder / "c", OpenMode::kCreate); }), ENOSPC);
    CHECK_EQ(code_of([&] { files().remove(folder / "file"); }), ENOSPC);
    CHECK_EQ(files().read_all(folder / "file").size(), 3u);
    CHECK_EQ(files().list(folder.path()).size(), 2u);
  }
  disk->heal();
  files().make_folder(folder / "b");
}

TEST(a_failed_write_leaves_any_prefix_of_its_bytes) {
  TempFolder folder;
  WithFaults disk;
  for (OpenMode mode : {OpenMode::kCreate, OpenMode::kCreateDirect}) {
    constexpr size_t kBytes = 8 * kIoAlign;
    char* const memory = static_cast<char*>(std::aligned_alloc(kIoAlign, kBytes));
    std::memset(memory, 7, kBytes);
    std::set<size_t> sizes;
    for (int i = 0; i < 60; ++i) {
      const std::string path = folder / "file";
      auto file = files().open(path, mode);
      disk->fail(1, ENOSPC);
      CHECK_EQ(code_of([&] { file->write(0, memory, kBytes); }), ENOSPC);
      const std::vector<char> left = files().read_all(path);
      CHECK(left.size() <= kBytes);
      CHECK(std::all_of(left.begin(), left.end(), [](char c) { return c == 7; }));
      sizes.insert(left.size());
      files().remove(path);
    }
    CHECK(sizes.contains(0) && sizes.contains(kBytes));
    CHECK(sizes.size() >= 6);
    std::free(memory);
  }
}

// Makes each call of a Files helper fail in turn, as users of faulty_files.h do.
TEST(replace_is_all_or_nothing_whichever_call_fails) {
  const std::string before(5000, 'b'), after(70000, 'a');
  for (bool repeat : {false, true}) {
    for (uint64_t at = 1;; ++at) {
      TempFolder folder;
      files().replace(folder / "file", before.data(), before.size());
      WithFaults disk;
      disk->fail(at, EIO, repeat);
      const int code = code_of([&] { files().replace(folder / "file", after.data(), after.size()); });
      const uint64_t calls = disk->calls();
      const std::vector<char> left = system_files().read_all(folder / "file");
      const std::string content(left.begin(), left.end());
      CHECK(content == before || content == after);
      CHECK(code == EIO || content == after);
      if (!repeat) CHECK_EQ(system_files().list(folder.path()).size(), 1u);
      disk->heal();
      files().replace(folder / "file", after.data(), after.size());
      CHECK_EQ(files().read_all(folder / "file").size(), after.size());
      CHECK_EQ(files().list(folder.path()).size(), 1u);
      if (code == 0) {
        CHECK_EQ(calls, 5u);
        break;
      }
    }
  }
}

TEST(a_copy_that_fails_leaves_none) {
  const std::string content(3000000, 'c');
  for (uint64_t at = 1;; ++at) {
    TempFolder folder;
    files().replace(folder / "from", content.data(), content.size());
    WithFaults disk;
    disk->fail(at, ENOSPC);
    const int code = code_of([&] { files().copy(folder / "from", folder / "to"); });
    CHECK_EQ(files().exists(folder / "to"), code == 0);
    if (code == 0) break;
  }
}

TEST(calls_from_many_threads_are_all_counted) {
  TempFolder folder;
  files().replace(folder / "file", "abc", 3);
  WithFaults disk;
  const auto file = files().open(folder / "file", OpenMode::kRead);
  disk->fail(1500, EIO);
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      char bytes[3];
      for (int i = 0; i < 1000; ++i) failed += code_of([&] { file->read(0, bytes, 3); }) == EIO;
    });
  for (auto& thread : threads) thread.join();
  CHECK_EQ(disk->calls(), 4001u);
  CHECK_EQ(failed.load(), 1);
}

TEST(a_file_may_outlive_the_faulty_files_it_came_from) {
  TempFolder folder;
  std::unique_ptr<File> file;
  {
    WithFaults disk;
    CHECK(!files().supports_descriptor_reads());
    file = files().open(folder / "file", OpenMode::kCreate);
  }
  CHECK(files().supports_descriptor_reads());
  file->write(0, "abc", 3);
  CHECK_EQ(file->size(), 3u);
}

}  // namespace
}  // namespace hotrow
