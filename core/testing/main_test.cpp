// Runs every test of the core, or those whose file or name contains the first argument.
#include <cstring>
#include <exception>

#include "testing/test.h"

using namespace hotrow::testing;

int main(int argc, char** argv) {
  const char* words = argc > 1 ? argv[1] : "";
  int passed = 0, failed = 0;
  for (const Test& test : tests()) {
    if (!std::strstr(test.name, words) && !std::strstr(base_name(test.file).data(), words)) continue;
    running = test.name;
    failures = 0;
    try {
      test.body();
    } catch (const std::exception& error) {
      fail(test.file, 0, std::string("ended by an exception: ") + error.what());
    }
    if (failures > kMostPrinted) std::printf("%s: %d more failures\n", test.name, failures - kMostPrinted);
    ++(failures == 0 ? passed : failed);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0 || passed == 0;
}
