//go:build linux

// Command bench measures what dpserve adds and costs as a gateway: direct, plain Go ReverseProxy, nginx
// (where it is installed) and dpserve stand side by side in one run, their slices interleaved, so that ratios
// hold on a noisy machine. Engines are mocks that speak vLLM-shaped SSE with next to no cost of their own;
// how long they slept before a first chunk is in the stream, and is taken off every latency. CPU is user+sys
// of the gateway's processes from their CPU clocks (Linux): exact to the nanosecond, with threads that have
// ended. How to read the numbers: docs/performance.md.
//
//	go run ./test/bench -dpserve bin/dpserve
//	go run ./test/bench -dpserve before,after -only paced
//
// Role policies compares the routing policies: the same multi-turn load on four simulated ranks under each of
// them, on fresh processes. Role policy-cpu measures what a policy costs the gateway, with the mocks of the
// first role.
//
//	go run ./test/bench -role policies -rounds 1 -traffic chat -policies lmetric-1,kv-tuned
//	go run ./test/bench -role policy-cpu
//
// Role pd compares six simulated ranks that do everything with the same six when two of them compute the
// prompts of the other four, at the same load: traffics for which that pays, and traffics for which it does
// not. Role pd-cpu measures what a request of two legs costs the gateway beside one of one leg, with the
// mocks of the first role.
//
//	go run ./test/bench -role pd -rounds 1 -traffic documents -policies apart
//	go run ./test/bench -role pd-cpu
package main
