#include "io/reader.h"

#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "testing/faulty_files.h"
#include "testing/random.h"
#include "testing/temp_folder.h"
#include "testing/test.h"

namespace hotrow {
namespace {

using testing::Random;
using testing::TempFolder;

using Memory = std::unique_ptr<char, void (*)(void*)>;
Memory aligned(size_t bytes) {
  return {static_cast<char*>(std::aligned_alloc(kIoAlign, std::max(bytes, kIoAlign))), std::free};
}

constexpr size_t kBlocks = 700;
constexpr size_t kOdd = 1234;  // bytes after the last whole block

// A file of random bytes, opened buffered and direct, with its contents by plain pread.
struct Sample {
  Sample() {
    Random random(11);
    Memory bytes = aligned((kBlocks + 1) * kIoAlign);
    for (size_t i = 0; i < (kBlocks + 1) * kIoAlign; i += 8) {
      const uint64_t bits = random.bits();
      std::memcpy(bytes.get() + i, &bits, 8);
    }
    auto file = files().open(folder / "file", OpenMode::kCreate);
    file->write(0, bytes.get(), kBlocks * kIoAlign + kOdd);
    file->sync();
    direct = files().open(folder / "file", OpenMode::kReadDirect);
    buffered = files().open(folder / "file", OpenMode::kRead);
  }
  TempFolder folder;
  std::unique_ptr<File> direct, buffered;
};

struct Batch {
  Batch(const Sample& sample, Random& random, size_t count) : reference(sample.buffered->descriptor()) {
    for (size_t i = 0; i < count; ++i) {
      const bool direct = random.below(3) > 0;
      const uint64_t unit = direct ? kIoAlign : 1;
      const auto bytes = static_cast<uint32_t>(random.below(9 * kIoAlign) / unit * unit);
      const uint64_t offset = random.below((kBlocks + 3) * kIoAlign) / unit * unit;
      memory.push_back(aligned((bytes + kIoAlign - 1) / kIoAlign * kIoAlign));
      const File* file = direct ? sample.direct.get() : sample.buffered.get();
      requests.push_back({file, offset, memory.back().get(), bytes, /*error=*/99});
    }
  }

  void check() const {
    std::vector<char> expected;
    for (const ReadRequest& each : requests) {
      expected.resize(each.bytes);
      const ssize_t got = ::pread(reference, expected.data(), each.bytes, static_cast<off_t>(each.offset));
      CHECK_EQ(each.error, got == static_cast<ssize_t>(each.bytes) ? 0 : -1);
      if (each.error == 0) CHECK(std::equal(expected.begin(), expected.end(), each.into));
    }
  }

  int reference;
  std::vector<Memory> memory;
  std::vector<ReadRequest> requests;
};

using Open = std::unique_ptr<Reader> (*)(int);

// Runs a test with each kind of reader that this machine has.
void with_each(const std::function<void(Open)>& body) {
  for (Open open : {open_posix_reader, open_uring_reader})
    if (open(1)) body(open);
}

TEST(both_readers_read_what_pread_reads) {
  const Sample sample;
  with_each([&](Open open) {
    Random random(12);
    for (int depth : {1, 3, 20, 128}) {
      const auto reader = open(depth);
      CHECK_EQ(reader->depth(), depth);
      for (size_t count : {0, 1, 2, 7, 127, 400}) {
        Batch batch(sample, random, count);
        reader->submit(batch.requests.data(), count);
        reader->wait();
        batch.check();
      }
    }
  });
}

TEST(reads_submitted_in_several_calls_are_all_finished_by_one_wait) {
  const Sample sample;
  with_each([&](Open open) {
    Random random(13);
    const auto reader = open(16);
    reader->wait();
    std::vector<Batch> batches;
    for (size_t i = 0; i < 40; ++i) batches.emplace_back(sample, random, random.below(5));
    for (Batch& each : batches) reader->submit(each.requests.data(), each.requests.size());
    reader->wait();
    for (Batch& each : batches) each.check();
    reader->wait();
  });
}

TEST(a_read_past_the_end_is_an_error_of_that_read_alone) {
  const Sample sample;
  with_each([&](Open open) {
    const auto reader = open(8);
    const Memory memory = aligned(6 * kIoAlign);
    for (const File* file : {sample.direct.get(), sample.buffered.get()}) {
      const auto request = [&](uint64_t block, int place, uint32_t blocks) {
        return ReadRequest{file, block * kIoAlign, memory.get() + place * kIoAlign, uint32_t(blocks * kIoAlign)};
      };
      ReadRequest requests[] = {request(kBlocks - 1, 0, 1), request(kBlocks - 1, 1, 2), request(kBlocks, 3, 1),
                                request(kBlocks + 1, 4, 1), request(uint64_t{1} << 30, 5, 1)};
      reader->submit(requests, 5);
      reader->wait();
      CHECK_EQ(requests[0].error, 0);
      for (int i : {1, 2, 3, 4}) CHECK_EQ(requests[i].error, -1);
    }
  });
}

TEST(closing_a_reader_waits_for_its_reads) {
  const Sample sample;
  with_each([&](Open open) {
    Random random(14);
    for (int round = 0; round < 5; ++round) {
      Batch batch(sample, random, 50);
      open(64)->submit(batch.requests.data(), batch.requests.size());
      batch.check();
    }
  });
}

TEST(a_reader_can_be_handed_over_while_it_reads) {
  const Sample sample;
  with_each([&](Open open) {
    Random random(15);
    const auto reader = open(64);
    for (int round = 0; round < 10; ++round) {
      Batch batch(sample, random, 60);
      std::thread([&] { reader->submit(batch.requests.data(), batch.requests.size()); }).join();
      reader->wait();
      batch.check();
    }
  });
}

TEST(many_readers_may_read_one_file) {
  const Sample sample;
  with_each([&](Open open) {
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        Random random(16 + t);
        const auto reader = open(32);
        for (int round = 0; round < 5; ++round) {
          Batch batch(sample, random, 100);
          reader->submit(batch.requests.data(), batch.requests.size());
          reader->wait();
          batch.check();
        }
      });
    for (auto& thread : threads) thread.join();
  });
}

TEST(signals_do_not_disturb_reads) {
  const Sample sample;
  struct sigaction counting{}, before;
  static std::atomic<int> signals;
  signals = 0;
  counting.sa_handler = [](int) { ++signals; };  // and no SA_RESTART
  ::sigaction(SIGALRM, &counting, &before);
  const itimerval often{{0, 300}, {0, 300}}, never{};
  ::setitimer(ITIMER_REAL, &often, nullptr);
  with_each([&](Open open) {
    Random random(17);
    const auto reader = open(32);
    for (int round = 0; round < 20; ++round) {
      Batch batch(sample, random, 200);
      reader->submit(batch.requests.data(), batch.requests.size());
      reader->wait();
      batch.check();
    }
  });
  ::setitimer(ITIMER_REAL, &never, nullptr);
  ::sigaction(SIGALRM, &before, nullptr);
  CHECK(signals > 0);
}

// A descriptor of any kind, as a file.
class AnyFile : public File {
 public:
  explicit AnyFile(int descriptor) : descriptor_(descriptor) {}
  void read(uint64_t, void*, size_t) const override { throw IoError(EBADF, "read", path_); }
  void write(uint64_t, const void*, size_t) override {}
  void truncate(uint64_t) override {}
  void sync() override {}
  uint64_t size() const override { return 0; }
  int descriptor() const override { return descriptor_; }
  const std::string& path() const override { return path_; }

 private:
  int descriptor_;
  std::string path_ = "none";
};

TEST(an_error_of_the_system_reaches_its_request_and_no_other) {
  const Sample sample;
  const AnyFile none(-1);
  with_each([&](Open open) {
    Random random(18);
    const auto reader = open(10);
    Batch batch(sample, random, 90);
    std::vector<ReadRequest> mixed;
    for (const ReadRequest& each : batch.requests) {
      mixed.push_back(each);
      mixed.push_back({&none, 0, each.into, 1});
    }
    reader->submit(mixed.data(), mixed.size());
    reader->wait();
    for (size_t i = 0; i < mixed.size(); i += 2) {
      batch.requests[i / 2] = mixed[i];
      CHECK_EQ(mixed[i + 1].error, EBADF);
    }
    batch.check();
  });
}

// A pipe returns the bytes it has, so a longer read is continued in pieces.
TEST(a_read_in_pieces_is_put_together) {
  const auto reader = open_uring_reader(4);
  if (!reader) return;
  int ends[2];
  CHECK_EQ(::pipe(ends), 0);
  const AnyFile pipe(ends[0]);
  std::string sent, received(3000, '?');
  for (size_t i = 0; i < received.size(); ++i) sent.push_back(static_cast<char>(i * 7));
  ReadRequest request{&pipe, 0, received.data(), static_cast<uint32_t>(received.size())};
  reader->submit(&request, 1);
  std::thread writer([&] {
    for (size_t i = 0; i < sent.size(); i += 500) {
      CHECK_EQ(::write(ends[1], sent.data() + i, 500), 500);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
  reader->wait();
  writer.join();
  CHECK_EQ(request.error, 0);
  CHECK(received == sent);
  reader->submit(&request, 1);
  ::close(ends[1]);
  reader->wait();
  CHECK_EQ(request.error, -1);
  ::close(ends[0]);
}

// Sets HOTROW_IO for a scope; null unsets it.
class WithChoice {
 public:
  explicit WithChoice(const char* value) {
    const char* before = std::getenv("HOTROW_IO");
    if (before) before_ = before, had_ = true;
    set(value);
  }
  ~WithChoice() { set(had_ ? before_.c_str() : nullptr); }

 private:
  static void set(const char* value) { value ? ::setenv("HOTROW_IO", value, 1) : ::unsetenv("HOTROW_IO"); }
  std::string before_;
  bool had_ = false;
};

TEST(the_environment_can_choose_the_threads) {
  const bool has_uring = open_uring_reader(1) != nullptr;
  const std::string best = has_uring ? "io_uring" : "posix";
  {
    WithChoice choice(nullptr);
    CHECK_EQ(open_reader()->name(), best);
    CHECK_EQ(open_reader()->depth(), 128);
    CHECK_EQ(open_reader(1 << 30)->depth(), kMostDepth);
    CHECK_THROWS(std::invalid_argument, open_reader(0));
  }
  {
    WithChoice choice("posix");
    CHECK_EQ(std::string(open_reader()->name()), "posix");
  }
  {
    WithChoice choice("io_uring");
    CHECK_EQ(open_reader()->name(), best);
  }
  WithChoice choice("fast");
  CHECK_THROWS(std::invalid_argument, open_reader());
}

TEST(threads_read_where_the_kernel_refuses_a_ring) {
  WithChoice choice(nullptr);
  const Sample sample;
  Random random(19);
  Batch batch(sample, random, 30);
  rlimit before;
  ::getrlimit(RLIMIT_NOFILE, &before);
  const rlimit none{3, before.rlim_max};  // a ring needs a descriptor
  ::setrlimit(RLIMIT_NOFILE, &none);
  const auto reader = open_reader();
  ::setrlimit(RLIMIT_NOFILE, &before);
  CHECK_EQ(std::string(reader->name()), "posix");
  reader->submit(batch.requests.data(), batch.requests.size());
  reader->wait();
  batch.check();
}

TEST(faults_reach_the_reads_of_a_reader) {
  WithChoice choice(nullptr);
  WithFaults disk;
  const Sample sample;
  const auto reader = open_reader();
  CHECK_EQ(std::string(reader->name()), "posix");
  const Memory memory = aligned(50 * kIoAlign);
  std::vector<ReadRequest> requests;
  for (size_t i = 0; i < 50; ++i)
    requests.push_back({sample.direct.get(), i * kIoAlign, memory.get() + i * kIoAlign, uint32_t(kIoAlign)});
  const uint64_t before = disk->calls();
  disk->fail(20, EIO);
  reader->submit(requests.data(), requests.size());
  reader->wait();
  CHECK_EQ(disk->calls() - before, 50u);
  CHECK_EQ(std::count_if(requests.begin(), requests.end(), [](const ReadRequest& r) { return r.error == EIO; }), 1);
  CHECK_EQ(std::count_if(requests.begin(), requests.end(), [](const ReadRequest& r) { return r.error == 0; }), 49);
}

}  // namespace
}  // namespace hotrow
