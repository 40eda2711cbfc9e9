// Search over torch's tensors, by address. The Python caller has checked shapes, dtypes and sums of lengths.
#include "bindings/bindings.h"
#include "search/similar_events.h"

namespace hotrow::bindings {

void bind_search(nb::module_& m) {
  m.def("has_similar_events", &has_similar_events);
  m.def("similar_events",
        [](Address candidates, size_t candidate_stride, Address events, size_t event_stride, Address rows,
           Address lengths, Address visible, size_t users, size_t dim, size_t keep, Address index, Address counts) {
          const SimilarInputs in{at<const float>(candidates),
                                 at<const float>(events),
                                 candidate_stride,
                                 event_stride,
                                 at<const int64_t>(rows),
                                 at<const int64_t>(lengths),
                                 at<const int64_t>(visible),
                                 users,
                                 dim,
                                 keep};
          nb::gil_scoped_release release;
          similar_events(in, at<int64_t>(index), at<int64_t>(counts));
        });
}

}  // namespace hotrow::bindings
