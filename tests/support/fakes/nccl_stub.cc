// NCCL's functions over the host's memory, for ranks that are threads: what tessera/engine/collectives/nccl_library.py
// calls, with the signatures and numbers of nccl.h. Sums are in the order of the ranks.
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace {

constexpr int OK = 0, INVALID_ARGUMENT = 4, REMOTE_ERROR = 6;
constexpr int SUM = 0;
enum Type { INT32 = 2, UINT64 = 5, FLOAT32 = 7, BFLOAT16 = 9 };

struct Transfer {
  char* memory;
  size_t bytes;
  int peer;
};

struct Group {
  std::mutex mutex;
  std::condition_variable changed;
  int size = 0, arrived = 0;
  long round = 0;
  bool aborted = false;
  std::vector<const void*> shown;
  std::vector<std::vector<Transfer>> sends;

  // -> whether all have come.
  bool meet() {
    std::unique_lock<std::mutex> lock(mutex);
    const long mine = round;
    if (++arrived == size) {
      arrived = 0;
      ++round;
      changed.notify_all();
    }
    changed.wait(lock, [&] { return round != mine || aborted; });
    return !aborted;
  }
};

struct Comm {
  Group* group;
  int rank;
};

struct UniqueId {
  char bytes[128];
};

std::mutex groups_mutex;
std::map<int, Group*> groups;
int next_group = 1;
thread_local bool grouping = false;
thread_local Comm* grouped = nullptr;
thread_local std::vector<Transfer> sends, receives;

size_t size_of(int type) { return type == UINT64 ? 8 : type == BFLOAT16 ? 2 : 4; }

float widen(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void reduce(const Group& group, char* out, size_t i, int type, int operation) {
  const int ranks = group.size;
  if (type == UINT64) {
    uint64_t best = 0;
    for (int r = 0; r < ranks; ++r) {
      const uint64_t value = static_cast<const uint64_t*>(group.shown[r])[i];
      best = operation == SUM ? best + value : value > best ? value : best;
    }
    std::memcpy(out + i * 8, &best, 8);
    return;
  }
  float sum = 0;
  for (int r = 0; r < ranks; ++r) {
    sum += type == FLOAT32 ? static_cast<const float*>(group.shown[r])[i]
                           : widen(static_cast<const uint16_t*>(group.shown[r])[i]);
  }
  const uint16_t half = narrow(sum);
  type == FLOAT32 ? std::memcpy(out + i * 4, &sum, 4) : std::memcpy(out + i * 2, &half, 2);
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  *version = 22809;
  return OK;
}

const char* ncclGetErrorString(int status) {
  return status == INVALID_ARGUMENT ? "invalid argument" : status == REMOTE_ERROR ? "remote process exited" : "unknown";
}

int ncclGetUniqueId(UniqueId* id) {
  std::lock_guard<std::mutex> lock(groups_mutex);
  std::memset(id, 0, sizeof(*id));
  id->bytes[127] = static_cast<char>(next_group);
  groups[next_group++] = new Group;
  return OK;
}

int ncclCommInitRank(Comm** comm, int size, UniqueId id, int rank) {
  Group* group;
  {
    std::lock_guard<std::mutex> lock(groups_mutex);
    const auto found = groups.find(id.bytes[127]);
    if (found == groups.end() || rank < 0 || rank >= size) return INVALID_ARGUMENT;
    group = found->second;
    group->size = size;
    group->shown.resize(size);
    group->sends.resize(size);
  }
  *comm = new Comm{group, rank};
  return group->meet() ? OK : REMOTE_ERROR;
}

int ncclCommAbort(Comm* comm) {
  std::lock_guard<std::mutex> lock(comm->group->mutex);
  comm->group->aborted = true;
  comm->group->changed.notify_all();
  return OK;
}

int ncclCommDestroy(Comm*) { return OK; }

int ncclAllReduce(const void* in, void* out, size_t count, int type, int operation, Comm* comm, void*) {
  Group& group = *comm->group;
  group.shown[comm->rank] = in;
  if (!group.meet()) return REMOTE_ERROR;
  std::vector<char> result(count * size_of(type));
  for (size_t i = 0; i < count; ++i) reduce(group, result.data(), i, type, operation);
  if (!group.meet()) return REMOTE_ERROR;
  std::memcpy(out, result.data(), result.size());
  return group.meet() ? OK : REMOTE_ERROR;
}

int ncclBroadcast(const void* in, void* out, size_t count, int type, int root, Comm* comm, void*) {
  Group& group = *comm->group;
  group.shown[comm->rank] = in;
  if (!group.meet()) return REMOTE_ERROR;
  if (comm->rank != root) std::memcpy(out, group.shown[root], count * size_of(type));
  return group.meet() ? OK : REMOTE_ERROR;
}

int ncclGroupStart() {
  grouping = true;
  grouped = nullptr;
  sends.clear();
  receives.clear();
  return OK;
}

int ncclSend(void* memory, size_t count, int type, int peer, Comm* comm, void*) {
  if (!grouping) return INVALID_ARGUMENT;
  grouped = comm;
  sends.push_back({static_cast<char*>(memory), count * size_of(type), peer});
  return OK;
}

int ncclRecv(void* memory, size_t count, int type, int peer, Comm* comm, void*) {
  if (!grouping) return INVALID_ARGUMENT;
  grouped = comm;
  receives.push_back({static_cast<char*>(memory), count * size_of(type), peer});
  return OK;
}

// What a rank receives from another is what that one sends to it, in the order of the calls.
int ncclGroupEnd() {
  grouping = false;
  if (grouped == nullptr) return OK;
  Group& group = *grouped->group;
  group.sends[grouped->rank] = sends;
  if (!group.meet()) return REMOTE_ERROR;
  std::vector<size_t> next(group.size, 0);
  bool right = true;
  for (const Transfer& receive : receives) {
    const std::vector<Transfer>& theirs = group.sends[receive.peer];
    size_t& i = next[receive.peer];
    while (i < theirs.size() && theirs[i].peer != grouped->rank) ++i;
    right = right && i < theirs.size() && theirs[i].bytes == receive.bytes;
    if (right) std::memcpy(receive.memory, theirs[i++].memory, receive.bytes);
  }
  if (!group.meet()) return REMOTE_ERROR;
  return right ? OK : INVALID_ARGUMENT;
}

}  // extern "C"
