// The operating system's files, even if a test has replaced files(). Only tests and testing/faulty_files.h call this.
#pragma once

#include "io/files.h"

namespace hotrow {

Files& system_files();

}  // namespace hotrow
