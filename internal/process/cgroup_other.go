//go:build unix && !linux

package process

import "errors"

// CgroupPrefix begins the name of a launch's cgroup.
const CgroupPrefix = "dpserve-launch-"

var errNoCgroups = errors.New("this system has no cgroups")

// CgroupOf needs Linux.
func CgroupOf(string) (string, error) { return "", errNoCgroups }

// MakeCgroup needs Linux.
func MakeCgroup(string) error { return errNoCgroups }

// RemoveEmptyCgroups has nothing to remove on this system.
func RemoveEmptyCgroups() {}

// LaunchCgroups lists none on this system.
func LaunchCgroups() []Launch { return nil }

// InLaunchCgroup is false on this system.
func InLaunchCgroup(int) bool { return false }

// Memory is not known on this system.
func Memory(string) uint64 { return 0 }

func cgroupPIDs(string) []int { return nil }

func killCgroup(string) {}

func removeCgroup(string) bool { return true }

func outOfMemory(string) uint64 { return 0 }
