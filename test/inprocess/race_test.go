//go:build race

package inprocess

// defaultSeeds is smaller here: the race detector makes a walk ten times as long.
const defaultSeeds = 12
