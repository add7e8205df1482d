//go:build !race

package inprocess

const defaultSeeds = 50 // .ci/run plays 200
