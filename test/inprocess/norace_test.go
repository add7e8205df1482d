//go:build !race

package inprocess

const defaultSeeds = 200
