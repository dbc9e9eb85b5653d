// Times llama.cpp through its C API, one command a line on stdin, one JSON line on stdout each:
//   prefill N       ms of one N-token prompt
//   decode S C N    ms of each of N steps of S sequences at context C
//   bandwidth       GB/s read by the given number of threads (the floor of decode)
// usage: harness MODEL.gguf THREADS BACKEND_DIR
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"

using Clock = std::chrono::steady_clock;

static double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

static void print_list(const std::vector<double>& values) {
  printf("[");
  for (size_t i = 0; i < values.size(); i++) printf("%s%.4f", i ? ", " : "", values[i]);
  printf("]\n");
  fflush(stdout);
}

// One llama_decode call: tokens[i] at pos[i] of sequence seq[i].
static double decode(llama_context* ctx, const std::vector<llama_token>& tokens, const std::vector<int>& pos,
                     const std::vector<int>& seq, const std::vector<bool>& wants_logits) {
  llama_batch batch = llama_batch_init((int32_t)tokens.size(), 0, 1);
  batch.n_tokens = (int32_t)tokens.size();
  for (size_t i = 0; i < tokens.size(); i++) {
    batch.token[i] = tokens[i];
    batch.pos[i] = pos[i];
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = seq[i];
    batch.logits[i] = wants_logits[i];
  }
  auto start = Clock::now();
  int rc = llama_decode(ctx, batch);
  llama_synchronize(ctx);
  double ms = ms_since(start);
  llama_batch_free(batch);
  if (rc != 0) {
    fprintf(stderr, "llama_decode returned %d\n", rc);
    exit(1);
  }
  return ms;
}

static double prefill(llama_context* ctx, int n, int seq) {
  std::vector<llama_token> tokens;
  std::vector<int> pos;
  for (int i = 0; i < n; i++) tokens.push_back(1000 + (i * 37 + seq * 101) % 20000), pos.push_back(i);
  std::vector<bool> logits(n, false);
  logits[n - 1] = true;
  return decode(ctx, tokens, pos, std::vector<int>(n, seq), logits);
}

static double bandwidth(int threads) {
  const size_t per_thread = size_t(256) << 20;
  std::vector<std::vector<uint64_t>> data(threads, std::vector<uint64_t>(per_thread / 8, 1));
  std::vector<uint64_t> sums(threads);
  double best = 0;
  for (int round = 0; round < 5; round++) {
    auto start = Clock::now();
    std::vector<std::thread> team;
    for (int t = 0; t < threads; t++)
      team.emplace_back([&, t] {
        uint64_t a = 0, b = 0, c = 0, d = 0;
        const auto& v = data[t];
        for (size_t i = 0; i + 4 <= v.size(); i += 4) a += v[i], b += v[i + 1], c += v[i + 2], d += v[i + 3];
        sums[t] = a + b + c + d;
      });
    for (auto& t : team) t.join();
    best = std::max(best, threads * per_thread / 1e6 / ms_since(start));
  }
  return best;
}

int main(int argc, char** argv) {
  if (argc != 4) return fprintf(stderr, "usage: harness MODEL.gguf THREADS BACKEND_DIR\n"), 2;
  int threads = atoi(argv[2]);
  auto start = Clock::now();
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  ggml_backend_load_all_from_path(argv[3]);
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (!model) return fprintf(stderr, "cannot load %s\n", argv[1]), 1;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 8192;
  params.n_batch = params.n_ubatch = 512;
  params.n_threads = params.n_threads_batch = threads;
  params.n_seq_max = 8;
  params.kv_unified = true;
  llama_context* ctx = llama_init_from_model(model, params);
  llama_memory_t memory = llama_get_memory(ctx);
  printf("{\"load_ms\": %.1f, \"system\": \"%s\"}\n", ms_since(start), llama_print_system_info());
  fflush(stdout);
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream in(line);
    std::string command;
    int a = 0, b = 0, c = 0;
    in >> command >> a >> b >> c;
    std::vector<double> times;
    llama_memory_clear(memory, true);
    if (command == "prefill") {
      times.push_back(prefill(ctx, a, 0));
    } else if (command == "decode") {
      for (int s = 0; s < a; s++) prefill(ctx, b, s);
      std::vector<int> seq;
      for (int s = 0; s < a; s++) seq.push_back(s);
      for (int i = 0; i < c; i++)
        times.push_back(decode(ctx, std::vector<llama_token>(a, 1005 + i), std::vector<int>(a, b + i), seq,
                               std::vector<bool>(a, true)));
    } else if (command == "bandwidth") {
      times.push_back(bandwidth(threads));
    } else {
      fprintf(stderr, "unknown command %s\n", command.c_str());
      return 2;
    }
    print_list(times);
  }
  return 0;
}
