//go:build !race

package inprocess

const defaultSeeds = 20 // .ci/run plays 100, make nightly 1,000
