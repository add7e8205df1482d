package server

import (
	"context"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/internal/devices"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// Words of --gpus.
const (
	autoGPUs = "auto"
	noGPUs   = "none"
)

// maxDevices bounds the devices that --gpus may declare on one node.
const maxDevices = 1024

// parseGPUs reads --gpus: a count ("4" declares devices 0..3) or a list ("0-3,6"); nil for auto, none and "".
func parseGPUs(s string) ([]int, error) {
	bad := problem.New(problem.InvalidArgument, "--gpus %q: want auto, none, a count or a list", s).
		WithHint("for example --gpus 4 or --gpus 0-3,6; auto offers what nvidia-smi or rocm-smi lists")
	if s == "" || s == autoGPUs || s == noGPUs {
		return nil, nil
	}
	if !strings.ContainsAny(s, "-,") {
		n, err := strconv.Atoi(s)
		if err != nil || n < 0 || n > maxDevices {
			return nil, bad
		}
		out := make([]int, n)
		for i := range out {
			out[i] = i
		}
		return out, nil
	}
	seen := map[int]bool{}
	var out []int
	for part := range strings.SplitSeq(s, ",") {
		a, b, isRange := strings.Cut(part, "-")
		lo, err := strconv.Atoi(a)
		hi := lo
		if err == nil && isRange {
			hi, err = strconv.Atoi(b)
		}
		if err != nil || lo < 0 || hi < lo || hi >= maxDevices {
			return nil, bad
		}
		for i := lo; i <= hi; i++ {
			if seen[i] {
				return nil, bad
			}
			seen[i] = true
			out = append(out, i)
		}
	}
	slices.Sort(out)
	return out, nil
}

// openDevices finds this machine's devices; nil if the node offers none.
func openDevices(ctx context.Context, n *Node) (*devices.Keeper, error) {
	declared, err := parseGPUs(n.cfg.GPUs)
	if err != nil || !n.hasRole(state.RoleWorker) || len(declared) == 0 && n.cfg.GPUs != autoGPUs {
		return nil, err
	}
	cfg := devices.KeeperConfig{
		Offer: declared, Timers: n.cfg.timers().devices, Log: n.log,
		Granted: func() []devices.Grant { return grantsOf(n.opened.State(), n.cfg.NodeID) },
		UnitOf: func(pid int) string {
			if worker := n.readyNode.Load(); worker != nil {
				return worker.UnitOf(pid)
			}
			return ""
		},
	}
	if visible, isSet := os.LookupEnv("CUDA_VISIBLE_DEVICES"); isSet {
		cfg.Visible = &visible
	}
	return devices.Open(ctx, cfg), nil
}

// deviceChecks returns how the supervisor checks devices; nil = it does not.
func deviceChecks(k *devices.Keeper) node.Devices {
	if k == nil {
		return nil
	}
	return k
}

// withDevices returns resources with the devices that a node offers now.
func withDevices(o state.Resources, k *devices.Keeper) state.Resources {
	if k == nil {
		return o
	}
	inv := k.Inventory()
	o.Devices = k.Offered()
	o.Near = devices.Within(inv.Near, o.Devices)
	o.Models = modelsOf(&inv, o.Devices)
	return o
}

// modelsOf groups the offered devices that were found by what they are.
func modelsOf(inv *devices.Inventory, offered []int) []state.DeviceModel {
	var out []state.DeviceModel
	for i := range inv.Devices {
		d := &inv.Devices[i]
		if !slices.Contains(offered, d.Index) {
			continue
		}
		same := slices.IndexFunc(out, func(m state.DeviceModel) bool {
			return m.Name == d.Name && m.MemoryMiB == max(0, d.TotalMiB)
		})
		if same < 0 {
			same = len(out)
			out = append(out, state.DeviceModel{
				Kind: string(inv.Kind), Name: d.Name, MemoryMiB: max(0, d.TotalMiB), Driver: inv.Driver,
			})
		}
		out[same].Devices = append(out[same].Devices, d.Index)
	}
	return out
}

// grantsOf returns what ranks of a node hold.
func grantsOf(s *state.State, node string) []devices.Grant {
	var out []devices.Grant
	for _, u := range s.Units {
		if !u.Holds() {
			continue
		}
		for i := range u.Ranks {
			if r := &u.Ranks[i]; r.Node == node {
				out = append(out, devices.Grant{Unit: u.ID, Devices: r.Devices, Share: r.Share})
			}
		}
	}
	return out
}
