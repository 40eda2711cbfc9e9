// The system's own files, whatever a test has put in their place. Everything but tests and faults calls files().
#pragma once

#include "io/files.h"

namespace hotrow {

Files& system_files();

}  // namespace hotrow
