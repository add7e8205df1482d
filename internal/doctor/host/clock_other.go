//go:build !linux

package host

import "github.com/dpserve/dpserve/internal/doctor"

// clockSync is not known on this system.
func clockSync() doctor.Sync { return doctor.SyncUnknown }
