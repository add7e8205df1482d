//go:build linux

// Command bench measures what dpserve adds and costs as a gateway: direct, plain Go ReverseProxy, nginx (where it is installed) and
// dpserve stand side by side in one run, their slices interleaved, so that ratios hold on a noisy machine. Engines are mocks that
// speak vLLM-shaped SSE with next to no cost of their own. CPU is user+sys of the gateway's process, from /proc (Linux).
//
//	go run ./test/bench -dpserve bin/dpserve
package main
