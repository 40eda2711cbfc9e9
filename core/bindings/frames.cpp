// Bindings of serve/: scan received bytes for frames, assemble requests into a batch, encode answers. Buffers are read
// in place and kept alive during the call.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <tuple>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "serve/batch_assembly.h"
#include "serve/dot_interaction.h"

namespace hotrow::bindings {
namespace {

using namespace hotrow::serve;

class BufferView {
 public:
  explicit BufferView(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  ~BufferView() { PyBuffer_Release(&view_); }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;
  const uint8_t* data() const { return static_cast<const uint8_t*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_;
};

// Request: (kind, id, offset, length, model, fingerprint, rows, deadline_left, policy, ids, features, dense).
// Malformed request: (kind, id, offset, length, error). Other frames: (kind, id, offset, length).
nb::tuple describe(const uint8_t* data, const FrameHead& head, size_t offset) {
  if (head.kind != static_cast<uint16_t>(FrameKind::kRequest))
    return nb::make_tuple(head.kind, head.id, offset, head.length);
  RequestView view;
  try {
    view.parse(data, head.length);
  } catch (const FrameError& error) {
    return nb::make_tuple(head.kind, head.id, offset, head.length, error.what());
  }
  const RequestHead& request = view.head;
  return nb::make_tuple(head.kind, head.id, offset, head.length, request.model, request.fingerprint, request.rows,
                        request.deadline_left, head.policy, view.joined_ids, request.features, request.dense);
}

nb::tuple scan(nb::handle buffer, size_t begin, size_t end, size_t longest) {
  BufferView held(buffer);
  if (begin > end || end > held.size()) throw FrameError("scan_frames: begin or end is outside of the buffer");
  nb::list frames;
  size_t wanted = sizeof(FrameHead);
  while (end - begin >= sizeof(FrameHead)) {
    const FrameHead head = read_head(held.data() + begin);
    if (head.length < sizeof(FrameHead) || head.length % 8 || head.length > longest)
      throw FrameError("a frame's length field is " + std::to_string(head.length) +
                       "; it must be a multiple of 8 from 16 to " + std::to_string(longest));
    if (head.length > end - begin) {
      wanted = head.length;
      break;
    }
    frames.append(describe(held.data() + begin, head, begin));
    begin += head.length;
  }
  return nb::make_tuple(frames, begin, wanted);
}

// slices: (buffer, offset, length, first row, rows). Returns values, offsets, weights or None, dense, and for each
// feature (begin, end, where its offsets begin or -1, whether it has weights).
nb::tuple join_frames(nb::list pieces, uint32_t features, uint32_t dense, uint32_t fingerprint, uint64_t most_ids) {
  const size_t count = pieces.size();
  std::vector<std::unique_ptr<BufferView>> held;
  std::vector<RequestSlice> found;
  held.reserve(count);
  found.reserve(count);
  PyObject* last = nullptr;
  for (nb::handle item : pieces) {
    auto piece = nb::cast<nb::tuple>(item);
    nb::handle buffer = piece[0];
    if (buffer.ptr() != last) held.push_back(std::make_unique<BufferView>(buffer));
    last = buffer.ptr();
    const BufferView& bytes = *held.back();
    const auto offset = nb::cast<size_t>(piece[1]), length = nb::cast<size_t>(piece[2]);
    if (offset > bytes.size() || length > bytes.size() - offset)
      throw FrameError("join_frames: a request is outside of its buffer");
    found.push_back({bytes.data() + offset, length, nb::cast<uint32_t>(piece[3]), nb::cast<uint32_t>(piece[4])});
  }
  AssembledBatch joined = [&] {
    nb::gil_scoped_release release;
    return assemble(found, {features, dense, fingerprint, most_ids});
  }();
  nb::list columns;
  for (const Column& column : joined.columns)
    columns.append(nb::make_tuple(column.begin, column.end,
                                  column.jagged ? static_cast<int64_t>(column.offsets) : int64_t{-1}, column.weighted));
  nb::object weights = joined.weighted ? array(std::move(joined.weights), {joined.ids}) : nb::none();
  return nb::make_tuple(joined.rows, array(std::move(joined.values), {joined.ids}),
                        array(std::move(joined.offsets), {joined.offset_count}), weights,
                        array(std::move(joined.dense), {joined.rows, dense}), columns);
}

// parts: (id, first row, rows, late).
nb::bytes make_answers(const std::vector<std::tuple<uint64_t, uint64_t, uint32_t, uint32_t>>& parts,
                       nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu> logits, uint32_t tasks,
                       uint32_t version, uint64_t publication, uint64_t highest, int64_t watermark, bool compiled) {
  if (logits.shape(1) != std::max<uint32_t>(1, tasks)) throw FrameError("make_answers: logits must be [rows, tasks]");
  std::vector<AnswerPart> found;
  found.reserve(parts.size());
  for (const auto& [id, first, rows, late] : parts) found.push_back({id, first, rows, late});
  const AnswerCommon common{version, publication, highest, watermark, compiled, tasks};
  const uint64_t size = answers_size(found, common);
  nb::object out = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
  if (!out.is_valid()) throw nb::python_error();
  auto* bytes = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(out.ptr()));
  write_answers(found, common, logits.data(), logits.shape(0), bytes);
  return nb::borrow<nb::bytes>(out);
}

}  // namespace

void bind_frames(nb::module_& m) {
  m.def("can_pair", &supports_dot_interaction, nb::arg("count"), nb::arg("dim"));
  m.def(
      "pair_dots",
      [](const std::vector<std::tuple<Address, size_t>>& vectors, size_t dim, Address lead, size_t lead_stride,
         size_t lead_width, size_t rows, Address out) {
        std::vector<StridedVectors> places;
        for (const auto& [address, stride] : vectors) places.push_back({at<const float>(address), stride});
        nb::gil_scoped_release release;
        dot_interaction(places, dim, {at<const float>(lead), lead_stride}, lead_width, rows, at<float>(out));
      },
      nb::arg("vectors"), nb::arg("dim"), nb::arg("lead"), nb::arg("lead_stride"), nb::arg("lead_width"),
      nb::arg("rows"), nb::arg("out"),
      "Writes the lead and the dot products of all pairs of vectors; arguments are addresses and strides.");
  nb::exception<FrameError>(m, "FrameError", PyExc_ValueError);
  m.def("scan_frames", &scan, nb::arg("buffer"), nb::arg("begin"), nb::arg("end"), nb::arg("longest"),
        "Returns the complete frames in [begin, end), the offset of the rest, and the length of the next frame.");
  m.def("join_frames", &join_frames, nb::arg("pieces"), nb::arg("features"), nb::arg("dense"), nb::arg("fingerprint"),
        nb::arg("most_ids"), "Assembles requests, or ranges of their rows, into the columns of one batch.");
  m.def("make_answers", &make_answers, nb::arg("parts"), nb::arg("logits").noconvert(), nb::arg("tasks"),
        nb::arg("version"), nb::arg("publication"), nb::arg("highest"), nb::arg("watermark"), nb::arg("compiled"),
        "Encodes answers as concatenated frames.");
}

}  // namespace hotrow::bindings
