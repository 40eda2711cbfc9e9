// A test is a named function; the whole framework is on this page.
//
//   TEST(erased_row_reads_as_new) { CHECK_EQ(table.size(), 0u); }
//
// CHECK records a failure and continues, so that one run shows all failures; a test prints only its first few. Checks
// may be made from any thread. `core_tests words` runs the tests whose file or name contains the words.
#pragma once

#include <atomic>
#include <cstdio>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace hotrow::testing {

struct Test {
  const char* file;
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registered {
  Registered(const char* file, const char* name, void (*body)()) { tests().push_back({file, name, body}); }
};

inline constexpr int kMostPrinted = 5;
inline std::atomic<const char*> running{""};
inline std::atomic<int> failures{0};  // of the running test

inline std::string_view base_name(std::string_view path) { return path.substr(path.rfind('/') + 1); }

inline void fail(const char* file, int line, const std::string& what) {
  if (failures.fetch_add(1) >= kMostPrinted) return;
  std::printf("%s:%d: %s: %s\n", base_name(file).data(), line, running.load(), what.c_str());
}

template <class A, class B>
void check_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream out;
  out << text << ": " << a << " and " << b;
  fail(file, line, out.str());
}

template <class Error, class Fn>
void check_throws(Fn fn, const char* text, const char* file, int line) {
  try {
    fn();
  } catch (const Error&) {
    return;
  } catch (...) {
    return fail(file, line, std::string("another exception than expected from ") + text);
  }
  fail(file, line, std::string("no exception from ") + text);
}

// What an Error said, or nothing when there was none.
template <class Error, class Fn>
std::string words_of(Fn fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace hotrow::testing

#define TEST(name)                                                                     \
  static void name();                                                                  \
  static const ::hotrow::testing::Registered name##_registered(__FILE__, #name, name); \
  static void name()
#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) ::hotrow::testing::fail(__FILE__, __LINE__, #condition); \
  } while (false)
#define CHECK_EQ(a, b) ::hotrow::testing::check_equal((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK_THROWS(Error, expression) \
  ::hotrow::testing::check_throws<Error>([&] { (void)(expression); }, #expression, __FILE__, __LINE__)
