package app

import (
	"fmt"
	"math"
	"strconv"

	"github.com/dpserve/dpserve/internal/share"
)

// Devices returns how many devices a rank gets: one if it shares it.
func (r *Resources) Devices() int { return int(math.Ceil(r.GPUs)) }

// Share returns the parts that a rank has of its one device; 0: its devices are its own.
func (r *Resources) Share() int {
	if r.GPUs >= 1 {
		return 0
	}
	parts, _ := share.Of(r.GPUs) // checkShare has refused others
	return parts
}

// settleResources derives the devices of one rank from its engine's arguments.
func settleResources(a *draft) {
	a.Resources.GPUsSet = a.has("resources.gpus")
	if a.Engine.Kind != KindAttach {
		checkShare(a)
	}
	switch a.Engine.Kind {
	case KindAttach:
		for _, key := range []string{"gpus", "cpus", "memory_gib"} {
			if a.isSound("resources." + key) {
				a.wrong("resources."+key, "an attached rank takes nothing of a node", "leave "+key+" out")
			}
		}
	case KindVLLM, KindSGLang:
		settleGPUs(a)
	case KindSim:
	}
}

func settleGPUs(a *draft) {
	tp, pp := a.tensor(), a.parallel("pipeline-parallel-size", "pp-size", "pp")
	if tp == 0 || pp == 0 {
		if a.isGood("engine.args") {
			a.refuse("engine.args", "tensor and pipeline parallel sizes count devices", "",
				fmt.Sprintf("integers from 1 to %d", maxParallel), "")
		}
		return
	}
	need, given := tp*pp, a.Resources.GPUs
	if a.Engine.Kind == KindSGLang && a.DataParallel.Coupling == Lockstep && a.DataParallel.DPSize > 0 {
		need = max(1, need/a.DataParallel.DPSize)
	}
	switch {
	case !a.Resources.GPUsSet:
		a.Resources.GPUs = float64(need)
	case given != 0 && a.Resources.Devices() != need && a.isGood("resources.gpus"):
		a.d.warn(a.at("resources.gpus"),
			fmt.Sprintf("the engine's parallel sizes use %d devices per rank, the file gives %g",
				need, given),
			"leave gpus out to give what the engine uses")
	}
	if a.Resources.Share() > 0 {
		checkMemoryOfShare(a)
	}
}

// checkShare refuses numbers of devices that are neither whole nor a share of one.
func checkShare(a *draft) {
	const key = "resources.gpus"
	gpus := a.Resources.GPUs
	if gpus == math.Trunc(gpus) || !a.isSound(key) {
		return
	}
	found, below := share.FormatDevices(gpus), math.Floor(gpus)
	if gpus > 1 {
		a.refuse(key, "a rank has whole devices, or a share of one", found,
			"a whole number, or a number below 1", fmt.Sprintf("write %g or %g", below, below+1))
		return
	}
	if _, isExact := share.Of(gpus); !isExact {
		below := share.Format(max(1, int(gpus*share.Whole)))
		a.refuse(key, fmt.Sprintf("a share has at most %d digits behind the point", share.Digits), found,
			below, "write "+below)
		return
	}
	if a.Engine.Kind != KindSim && a.DataParallel.Coupling == Lockstep {
		a.refuse(key, "the ranks of a lockstep group cannot share devices: NCCL refuses two ranks on one",
			found, "a whole number", "write coupling: independent, or give each rank a device")
	}
}

// memoryFlag is the flag by which an engine is given a fraction of its device's memory.
func (k Kind) memoryFlag() string {
	if k == KindSGLang {
		return "mem-fraction-static"
	}
	return "gpu-memory-utilization"
}

// MemoryOfShare returns the flag that limits an engine to the memory of its share of a device, and its value;
// "" if the rank's devices are its own, or the file has the flag. The engine gets nine tenths of the share:
// the rest is for what engines hold beside what they count.
func MemoryOfShare(a *Application) (flag, value string) {
	parts := a.Resources.Share()
	if a.Engine.Kind != KindVLLM && a.Engine.Kind != KindSGLang || parts == 0 {
		return "", ""
	}
	flag = a.Engine.Kind.memoryFlag()
	if _, isWritten := a.Engine.Args.Get(flag); isWritten {
		return "", ""
	}
	return flag, strconv.FormatFloat(float64(9*parts)/(10*share.Whole), 'f', -1, 64)
}

// checkMemoryOfShare warns about engines that would take more memory than their device has, if it is full of
// such ranks.
func checkMemoryOfShare(a *draft) {
	flag := a.Engine.Kind.memoryFlag()
	arg, isWritten := a.Engine.Args.find(flag)
	fraction, err := strconv.ParseFloat(fmt.Sprint(arg.Value), 64)
	ranks := share.Whole / a.Resources.Share()
	at := join("engine.args", arg.Name)
	if !isWritten || err != nil || fraction*float64(ranks) <= 1 || !a.isGood(at, "resources.gpus") {
		return
	}
	a.d.warn(a.at(at),
		fmt.Sprintf("%d ranks fit on one device, and each takes %g of its memory", ranks, fraction),
		fmt.Sprintf("leave it out to take nine tenths of the share, or write at most %.3g", 1/float64(ranks)))
}
