// Package devices finds the GPUs of this machine with nvidia-smi or rocm-smi: what is there, which of them
// are close to each other, and how much memory is in use by whom. A Keeper holds the answer for a node. The
// programs may be missing, hang or print anything: then there is a warning, never a failure.
//
// An error, a hang or nonsense of these programs never fails the node: it is a text in Trouble, and the last
// good reading stays. Only a good reading without a device says that it is gone. One program runs at a time;
// one that hangs in the driver keeps its slot, and later calls end at their own bound. Check (before a start)
// notes the memory in use, Held (after an end) compares with that note, because drivers and other programs
// hold some. Sets of close devices are cliques of direct links: in a mesh not every GPU has a link to every
// other one.
package devices

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Kind is the maker of the devices, by whose program they were found.
type Kind string

// The kinds. None means that no program that lists devices is installed.
const (
	None   Kind = ""
	Nvidia Kind = "nvidia"
	AMD    Kind = "amd"
)

// Unknown stands for a size that the program does not tell.
const Unknown = -1

// Device is one GPU.
type Device struct {
	Index    int // its number, by which it is granted
	UUID     string
	Name     string
	TotalMiB int64 // memory; Unknown
	UsedMiB  int64 // in use, by whomever; Unknown
	Holders  []Holder
	Fault    string // why it cannot be used, in the program's words; "" = it can
}

// Holder is a process that holds memory of a device. In a container the program may list numbers of the host,
// or none.
type Holder struct {
	PID  int
	MiB  int64  // Unknown
	Unit string // of this node, whose engine the process belongs to; "" = none, or it cannot be told
}

// Inventory is what a machine has.
type Inventory struct {
	Kind    Kind
	Driver  string
	Devices []Device // ascending by index
	// Near are sets of two or more devices that are close: within one NVLink or XGMI domain and one NUMA node
	// first, then within one of the two.
	Near [][]int
	// Warnings are for people: what the program printed and this package did not understand.
	Warnings []string
}

// Bounds of what is read.
const (
	maxDevices  = 1024 // the numbers are below it
	maxHolders  = 64   // processes of one device
	maxWarnings = 4
	maxText     = 160 // bytes of a text that a program printed
)

// Runner runs a program and returns its standard output, also with an error. The error is exec.ErrNotFound if
// there is no such program.
type Runner func(ctx context.Context, name string, args ...string) ([]byte, error)

// Probe finds the devices with the first of nvidia-smi and rocm-smi that answers; run nil = commands of this
// machine. Without either of them it returns an empty inventory and no error. ctx bounds it.
func Probe(ctx context.Context, run Runner) (Inventory, error) {
	if run == nil {
		run = NewRunner()
	}
	inv, err := list(ctx, run)
	if err == nil {
		inv.Near = near(ctx, run, &inv)
	}
	return inv, err
}

// list is Probe without Near.
func list(ctx context.Context, run Runner) (Inventory, error) {
	inv, err := listNvidia(ctx, run)
	if err == nil {
		return inv, nil
	}
	other, otherErr := listAMD(ctx, run)
	switch {
	case otherErr == nil:
		return other, nil
	case !errors.Is(err, exec.ErrNotFound):
		return Inventory{}, err
	case !errors.Is(otherErr, exec.ErrNotFound):
		return Inventory{}, otherErr
	default:
		return Inventory{}, nil
	}
}

// near returns Inventory.Near. Without an answer no devices are close: placement does without.
func near(ctx context.Context, run Runner, inv *Inventory) [][]int {
	if len(inv.Devices) < 2 {
		return nil
	}
	if inv.Kind == AMD {
		return nearAMD(ctx, run, inv)
	}
	return nearNvidia(ctx, run, inv)
}

// Find returns a device by its index, nil if it is not there.
func (inv *Inventory) Find(index int) *Device {
	for i := range inv.Devices {
		if inv.Devices[i].Index == index {
			return &inv.Devices[i]
		}
	}
	return nil
}

// indices returns the numbers of the devices.
func (inv *Inventory) indices() []int {
	out := make([]int, len(inv.Devices))
	for i := range inv.Devices {
		out[i] = inv.Devices[i].Index
	}
	return out
}

// numberIn returns the number of the device that a text names in the form of expr.
func numberIn(text string, expr *regexp.Regexp) (n int, ok bool) {
	m := expr.FindStringSubmatch(text)
	if m == nil {
		return 0, false
	}
	n, err := strconv.Atoi(m[1])
	return n, err == nil && n < maxDevices
}

// add adds a device, unless its number is taken.
func (inv *Inventory) add(d *Device) bool {
	if inv.Find(d.Index) != nil {
		return false
	}
	inv.Devices = append(inv.Devices, *d)
	slices.SortFunc(inv.Devices, func(a, b Device) int { return cmp.Compare(a.Index, b.Index) })
	return true
}

// warn adds a warning, while there are few.
func (inv *Inventory) warn(format string, args ...any) {
	if len(inv.Warnings) < maxWarnings {
		inv.Warnings = append(inv.Warnings, fmt.Sprintf(format, args...))
	}
}

// runError describes a command that failed, with the first line of what it printed.
func runError(name string, out []byte, err error) error {
	if errors.Is(err, exec.ErrNotFound) {
		return err
	}
	if line := firstLine(string(out)); line != "" && !strings.Contains(err.Error(), line) {
		return fmt.Errorf("%s: %w: %s", name, err, line)
	}
	return fmt.Errorf("%s: %w", name, err)
}

// firstLine returns the first line with text, for people.
func firstLine(text string) string {
	for line := range strings.Lines(text) {
		if clean := cleanText(line); clean != "" {
			return clean
		}
	}
	return ""
}

// cleanText makes one short printable line of what a program printed.
func cleanText(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == '\ufffd' {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, " "))
	s = strings.Join(strings.Fields(s), " ")
	if len(s) <= maxText {
		return s
	}
	return strings.ToValidUTF8(s[:maxText], "") + "…"
}

// topology is how the devices of a machine are connected.
type topology struct {
	links map[[2]int]bool // direct links, the lower number first
	numa  map[int]string  // NUMA nodes of a device, in the program's words
}

func newTopology() topology { return topology{links: map[[2]int]bool{}, numa: map[int]string{}} }

func (t topology) link(a, b int) { t.links[[2]int{min(a, b), max(a, b)}] = true }

func (t topology) isLinked(a, b int) bool { return t.links[[2]int{min(a, b), max(a, b)}] }

// setNUMA notes the NUMA node of a device; -1 and N/A say that there is none.
func (t topology) setNUMA(device int, node string) {
	if node != "" && node != "N/A" && node != "-1" {
		t.numa[device] = cleanText(node)
	}
}

// near returns the sets of close devices, the closest first: linked and on one NUMA node, linked, on one NUMA
// node. A set of all devices tells nothing and is left out.
func (t topology) near(devices []int) [][]int {
	linked, local := t.linkedSets(devices), t.numaSets(devices)
	var all [][]int
	for _, a := range linked {
		for _, b := range local {
			all = append(all, common(a, b))
		}
	}
	return Within(append(append(all, linked...), local...), devices)
}

// linkedSets divides the devices into sets in which each one is linked to each other one: a switch gives one
// set of all, bridges give pairs. The lowest number that is left begins the next set.
func (t topology) linkedSets(devices []int) [][]int {
	var out [][]int
	rest := slices.Clone(devices)
	for len(rest) > 0 {
		set := []int{rest[0]}
		for _, d := range rest[1:] {
			if !slices.ContainsFunc(set, func(s int) bool { return !t.isLinked(s, d) }) {
				set = append(set, d)
			}
		}
		rest = slices.DeleteFunc(rest, func(d int) bool { return slices.Contains(set, d) })
		if len(set) > 1 {
			out = append(out, set)
		}
	}
	return out
}

// numaSets divides the devices by NUMA node. Devices without one are in no set.
func (t topology) numaSets(devices []int) [][]int {
	byNode := map[string][]int{}
	for _, d := range devices {
		if node, ok := t.numa[d]; ok {
			byNode[node] = append(byNode[node], d)
		}
	}
	return slices.SortedFunc(maps.Values(byNode), func(a, b []int) int { return cmp.Compare(a[0], b[0]) })
}

// common returns the members of set that are in other too.
func common(set, other []int) []int {
	return slices.DeleteFunc(slices.Clone(set), func(d int) bool { return !slices.Contains(other, d) })
}

// Within returns the sets without devices that are not offered, as far as they still tell something.
func Within(near [][]int, offered []int) [][]int {
	var out [][]int
	for _, set := range near {
		set = common(set, offered)
		isKnown := slices.ContainsFunc(out, func(s []int) bool { return slices.Equal(s, set) })
		if len(set) > 1 && len(set) < len(offered) && !isKnown {
			out = append(out, set)
		}
	}
	return out
}
