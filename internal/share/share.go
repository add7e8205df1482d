// Package share counts parts of a device. A rank of `gpus: 0.25` has a share of one device, and other ranks
// may have the rest of it. Shares are integers, so that sums are exact: ten shares of 0.1 are one device,
// which they are not in floating point.
package share

import "strconv"

// Whole is one device. A share is a number of parts from 1 to Whole-1; 0 says that a rank has whole devices.
const Whole = 10_000

// Digits is how many digits behind the point a share may have: more do not fit the parts.
const Digits = 4

// Of returns the parts of a number of devices; false if it has more than Digits digits behind the point. Any
// number with fewer digits is converted exactly: it is the float64 next to parts/Whole.
func Of(devices float64) (parts int, ok bool) {
	parts = int(devices*Whole + 0.5)
	return parts, Devices(parts) == devices
}

// Devices returns parts as a number of devices.
func Devices(parts int) float64 { return float64(parts) / Whole }

// Format returns parts as a number of devices, for people: "0.25", "2".
func Format(parts int) string { return FormatDevices(Devices(parts)) }

// FormatDevices returns a number of devices for people, without zeros at its end.
func FormatDevices(devices float64) string { return strconv.FormatFloat(devices, 'f', -1, 64) }

// On returns the parts that a rank with a share has of each of its devices.
func On(share int) int {
	if share > 0 {
		return share
	}
	return Whole
}
