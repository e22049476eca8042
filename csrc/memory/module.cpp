// The Python face of csrc/memory and csrc/execute: conversions, and nothing else.

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../execute/instructions.h"
#include "accumulators.h"
#include "allocator.h"
#include "arena.h"
#include "heap.h"
#include "mapping.h"
#include "pager.h"
#include "python_arena.h"
#include "recorder.h"

namespace py = pybind11;

namespace torch_odt::memory {

namespace {

const char* reason_name(MissReason reason) {
  switch (reason) {
    case MissReason::occupied:
      return "occupied";
    case MissReason::size_mismatch:
      return "size_mismatch";
    case MissReason::past_record:
      return "past_record";
  }
  return "unknown";
}

py::dict as_dict(const ArenaStats& stats) {
  py::dict misses;
  misses["occupied"] = stats.occupied;
  misses["size_mismatch"] = stats.size_mismatch;
  misses["past_record"] = stats.past_record;
  py::dict result;
  result["reserved_bytes"] = stats.reserved_bytes;
  result["live_bytes"] = stats.live_bytes;
  result["live_blocks"] = stats.live_blocks;
  result["resident_bytes"] = stats.resident_bytes;
  result["held_bytes"] = stats.held_bytes;
  result["hits"] = stats.hits;
  result["smaller"] = stats.smaller;
  result["misses"] = misses;
  result["dynamic_hits"] = stats.dynamic_hits;
  result["dynamic_misses"] = stats.dynamic_misses;
  result["yields"] = stats.yields;
  return result;
}

py::dict all_stats() {
  Counters& count = counters();
  py::dict by_category;
  for (size_t i = 0; i < kCategoryNames.size(); ++i) {
    py::dict gauge;
    gauge["allocated_bytes"] = count.by_category[i].live();
    gauge["peak_bytes"] = count.by_category[i].peak();
    by_category[kCategoryNames[i]] = gauge;
  }
  py::dict result;
  result["allocated_bytes"] = count.allocated.live();
  result["peak_bytes"] = count.allocated.peak();
  result["outside_bytes"] = count.outside.live();
  result["outside_peak_bytes"] = count.outside.peak();
  result["allocation_count"] = count.allocation_count.load();
  result["by_category"] = by_category;
  result["arena"] = as_dict(arena_totals());
  return result;
}

py::list recorded_events() {
  py::list result;
  for (const Event& event : record_end()) {
    result.append(py::make_tuple(event.is_alloc ? "alloc" : "free", event.ordinal, event.bytes));
  }
  return result;
}

std::vector<uintptr_t> recorded_addresses() {
  std::vector<uintptr_t> result;
  for (const void* address : record_addresses()) {
    result.push_back(reinterpret_cast<uintptr_t>(address));
  }
  return result;
}

using NestedPlaces = std::vector<std::vector<std::pair<int64_t, int64_t>>>;

PlaceTable flattened(const NestedPlaces& nested) {
  PlaceTable table;
  table.starts.reserve(nested.size() + 1);
  table.starts.push_back(0);
  for (const auto& instruction : nested) {
    for (const auto& [offset, bytes] : instruction) {
      table.places.push_back({offset, bytes});
    }
    table.starts.push_back(static_cast<int64_t>(table.places.size()));
  }
  return table;
}

py::list sampled_misses(const Arena& arena) {
  py::list result;
  for (const Miss& miss : arena.core->misses()) {
    result.append(
        py::make_tuple(miss.instruction, miss.ordinal, miss.expected_bytes, miss.got_bytes, reason_name(miss.reason)));
  }
  return result;
}

void bind_arena(py::module_& module) {
  py::class_<Arena>(module, "Arena")
      .def(py::init<int64_t>(), py::arg("reserve_bytes"))
      .def(
          "load",
          [](Arena& arena, const NestedPlaces& table) { return arena.core->load(flattened(table)); },
          py::arg("table"))
      .def("unload", [](Arena& arena, int64_t id) { arena.core->unload(id); }, py::arg("table_id"))
      .def("select", [](Arena& arena, int64_t id) { arena.core->select(id); }, py::arg("table_id"))
      .def("begin", [](Arena& arena, int64_t instruction) { arena.core->begin(instruction); }, py::arg("instruction"))
      .def("end", [](Arena& arena) { arena.core->end(); })
      .def(
          "dynamic",
          [](Arena& arena, bool on, int64_t limit_bytes, bool refuses) {
            arena.core->set_dynamic(on, limit_bytes, refuses);
          },
          py::arg("on"),
          py::arg("limit_bytes") = -1,
          py::arg("refuses") = false)
      .def(
          "hold",
          [](Arena& arena, int64_t bytes) { arena.core->hold(bytes); },
          py::arg("nbytes"),
          py::call_guard<py::gil_scoped_release>())
      .def("release", [](Arena& arena, int64_t bytes) { return arena.core->release(bytes); }, py::arg("keep_bytes") = 0)
      .def(
          "vacate",
          [](Arena& arena, bool on) { arena.core->vacate(on); },
          py::arg("on"),
          py::call_guard<py::gil_scoped_release>())
      .def("resize", [](Arena& arena, int64_t bytes) { arena.core->resize(bytes); }, py::arg("reserve_bytes"))
      .def("set_yield_limit", [](Arena& arena, int64_t bytes) { arena.core->set_yield_limit(bytes); }, py::arg("bytes"))
      .def("stats", [](const Arena& arena) { return as_dict(arena.core->stats()); })
      .def("misses", &sampled_misses)
      .def("reset_misses", [](Arena& arena) { arena.core->reset_misses(); })
      .def_property_readonly("reserve_bytes", [](const Arena& arena) { return arena.core->stats().reserved_bytes; })
      .def_property_readonly("resident_bytes", [](const Arena& arena) { return arena.core->stats().resident_bytes; })
      .def_property_readonly("held_bytes", [](const Arena& arena) { return arena.core->stats().held_bytes; })
      .def_property_readonly("live_bytes", [](const Arena& arena) { return arena.core->stats().live_bytes; })
      .def_property_readonly("live_blocks", [](const Arena& arena) { return arena.core->stats().live_blocks; });
}

py::dict as_dict(const PagerStats& stats) {
  py::dict result;
  result["pages"] = stats.pages;
  result["file_bytes"] = stats.file_bytes;
  result["file_peak_bytes"] = stats.file_peak_bytes;
  result["written_bytes"] = stats.written_bytes;
  result["read_bytes"] = stats.read_bytes;
  result["written_pages"] = stats.written_pages;
  result["read_pages"] = stats.read_pages;
  result["retries"] = stats.retries;
  result["write_seconds"] = stats.write_seconds;
  result["read_seconds"] = stats.read_seconds;
  result["wait_seconds"] = stats.wait_seconds;
  return result;
}

// A pager and the file that it owns. Python's lock guards the rest.
class FilePager {
 public:
  FilePager(const std::string& folder, int64_t limit_bytes, int threads, bool packs, double patience_seconds)
      : FilePager(std::make_unique<BackingFile>(folder), limit_bytes, threads, packs, patience_seconds) {}
  ~FilePager() {
    // It waits for what is under way.
    const py::gil_scoped_release released;
    pager.reset();
  }
  FilePager(const FilePager&) = delete;
  FilePager& operator=(const FilePager&) = delete;

  // For a page that cannot be dropped yet: what owns its block lives on until it can.
  void abandon(int64_t id, py::object owner) {
    abandoned_.push_back({id, std::move(owner)});
  }
  // Drops what was abandoned. Throws PagingError when the device still does not answer.
  void settle() {
    while (!abandoned_.empty()) {
      Abandoned page = std::move(abandoned_.back());
      abandoned_.pop_back();
      try {
        wait_and_drop(page.id);
      } catch (const PagingError&) {
        abandoned_.push_back(std::move(page));
        throw;
      }
    }
  }

  const BackingFile* const file;
  std::unique_ptr<Pager> pager;

 private:
  struct Abandoned {
    int64_t id;
    py::object owner;
  };

  FilePager(
      std::unique_ptr<BackingFile> backing, int64_t limit_bytes, int threads, bool packs, double patience_seconds)
      : file(backing.get()),
        pager(std::make_unique<Pager>(std::move(backing), limit_bytes, threads, packs, patience_seconds)) {}

  void wait_and_drop(int64_t id) {
    const py::gil_scoped_release released;
    try {
      pager->wait(id);
    } catch (const PagingError& error) {
      // How it ended does not matter.
      if (error.fault == PagingFault::slow || error.fault == PagingFault::forked) {
        throw;
      }
    }
    pager->drop(id);
  }

  std::vector<Abandoned> abandoned_;
};

// What Python holds of a page. Made together with the page, so that an interrupt in between loses none: the end of this
// object is the end of its page, or hands it and what owns its block to the pager.
class HeldPage {
 public:
  HeldPage(std::shared_ptr<FilePager> pager, uintptr_t address, int64_t bytes, py::object owner)
      : pager_(std::move(pager)), owner_(std::move(owner)) {
    const py::gil_scoped_release released;
    id_ = pager_->pager->page_out(reinterpret_cast<const void*>(address), bytes);
  }
  ~HeldPage() {
    bool is_gone = false;
    {
      const py::gil_scoped_release released;
      is_gone = pager_->pager->drop(id_);
    }
    if (!is_gone) {
      pager_->abandon(id_, std::move(owner_));
    }
  }
  HeldPage(const HeldPage&) = delete;
  HeldPage& operator=(const HeldPage&) = delete;

  void page_in(uintptr_t address, py::object owner, bool is_last) {
    {
      const py::gil_scoped_release released;
      pager_->pager->page_in(id_, reinterpret_cast<void*>(address), is_last);
    }
    owner_ = std::move(owner);
  }
  void wait() {
    {
      const py::gil_scoped_release released;
      pager_->pager->wait(id_);
    }
    owner_ = py::object();
  }

 private:
  const std::shared_ptr<FilePager> pager_;
  py::object owner_;
  int64_t id_ = 0;
};

std::unique_ptr<HeldPage> page_out(
    const std::shared_ptr<FilePager>& self, uintptr_t address, int64_t bytes, py::object owner) {
  return std::make_unique<HeldPage>(self, address, bytes, std::move(owner));
}

const char* fault_name(PagingFault fault) {
  switch (fault) {
    case PagingFault::full:
      return "full";
    case PagingFault::torn:
      return "torn";
    case PagingFault::slow:
      return "slow";
    case PagingFault::forked:
      return "forked";
    default:
      return "failed";
  }
}

void bind_pager(py::module_& module) {
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) {
        std::rethrow_exception(error);
      }
    } catch (const PagingError& paging) {
      const py::object type = py::module_::import("torch_odt.errors").attr("PagingError");
      PyErr_SetObject(type.ptr(), type(paging.what(), fault_name(paging.fault)).ptr());
    }
  });
  py::class_<HeldPage>(module, "HeldPage")
      .def("page_in", &HeldPage::page_in, py::arg("address"), py::arg("owner"), py::arg("is_last") = false)
      .def("wait", &HeldPage::wait);
  py::class_<FilePager, std::shared_ptr<FilePager>>(module, "Pager")
      .def(
          py::init<const std::string&, int64_t, int, bool, double>(),
          py::arg("folder"),
          py::arg("limit_bytes"),
          py::arg("threads"),
          py::arg("packs"),
          py::arg("patience_seconds"))
      .def("page_out", &page_out, py::arg("address"), py::arg("bytes"), py::arg("owner"))
      .def("settle", &FilePager::settle)
      .def("stats", [](const FilePager& self) { return as_dict(self.pager->stats()); })
      .def_property_readonly("descriptor", [](const FilePager& self) { return self.file->descriptor(); })
      .def_property_readonly("is_direct", [](const FilePager& self) { return self.file->is_direct(); });
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.attr("torch_version") = TORCH_ODT_TORCH_VERSION;
  module.attr("categories") = py::tuple(py::cast(kCategoryNames));

  module.def("install", &install);
  module.def("uninstall", &uninstall);
  module.def("is_installed", &is_installed);

  module.def("stats", &all_stats);
  module.def("allocated_bytes", [] { return counters().allocated.live(); });
  module.def("peak_bytes", [] { return counters().allocated.peak(); });
  module.def("reset_peak", [] { counters().reset_peak(); });
  module.def("set_category", &set_category, py::arg("category"));
  module.def("tag", &tag, py::arg("address"), py::arg("category"));
  module.def("set_cap", &set_cap, py::arg("bytes"));
  module.def("refusals", [] { return refusals().count(); });
  module.def(
      "refuse_after",
      [](int64_t allocations, bool lasts) { refusals().refuse_after(allocations, lasts); },
      py::arg("allocations"),
      py::arg("lasts") = false);

  module.def("record_begin", &record_begin);
  module.def("record_end", &recorded_events);
  module.def("record_addresses", &recorded_addresses);

  module.def("phantom", &phantom_address, py::arg("bytes"));
  module.def("tune_malloc", &tune_malloc);
  module.def("trim", &trim);

  module.def("accumulator_holders", &accumulator_holders, py::arg("tensor"));

  bind_arena(module);
  bind_pager(module);
  execute::bind_execution(module);
}

} // namespace torch_odt::memory
