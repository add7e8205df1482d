package devices

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/process"
)

// Timers of a Keeper. A zero field means its default.
type Timers struct {
	Probe  time.Duration // bounds one reading of the devices
	Reread time.Duration // pause between two readings
}

// Defaults. The driver takes seconds to answer if nothing keeps it loaded.
const (
	DefaultProbe  = 10 * time.Second
	DefaultReread = 30 * time.Second
)

const (
	// freeWithin is how far the memory in use may be above that before an engine: the driver keeps some.
	freeWithin = 512 // MiB
	// takenFrom is more memory than a driver and a small desktop use of a device that no rank has.
	takenFrom = 1024 // MiB
)

// KeeperConfig is the configuration of a Keeper.
type KeeperConfig struct {
	// Offer names the devices to offer, whether they are found or not. nil = those that are found.
	Offer []int
	// Visible is CUDA_VISIBLE_DEVICES of this process: without Offer, only these are offered. nil = it is not
	// set.
	Visible *string
	Granted func() []Grant       // devices that units of this node have; nil = none
	UnitOf  func(pid int) string // unit of this node that a process belongs to, "" = none; nil = none
	Run     Runner               // nil = commands of this machine
	Timers  Timers
	Log     *slog.Logger
}

// Keeper holds what a node knows of its devices. Its methods are safe for concurrent use.
type Keeper struct {
	cfg     KeeperConfig
	reading chan struct{}   // one slot: who reads the devices
	said    map[string]bool // keys of the notes that Run has logged

	mu     sync.Mutex
	now    Inventory        // the last good reading
	seen   map[int]Device   // every device that was ever found
	before map[string]int64 // by device: MiB in use without an engine of this node
	taken  map[int]string   // devices that others use at the last reading, with who
	fault  string           // of the last reading; "" = it was good
	begun  int              // readings
	ended  int              // number of the last reading that has ended
	failed time.Time        // the last one that failed
}

// Open finds the devices, for at most Timers.Probe. It always succeeds: without an answer there are no
// devices, and Trouble says why.
func Open(ctx context.Context, cfg KeeperConfig) *Keeper {
	if cfg.Run == nil {
		cfg.Run = NewRunner()
	}
	if cfg.Granted == nil {
		cfg.Granted = func() []Grant { return nil }
	}
	if cfg.UnitOf == nil {
		cfg.UnitOf = func(int) string { return "" }
	}
	cfg.Timers.Probe = cmp.Or(cfg.Timers.Probe, DefaultProbe)
	cfg.Timers.Reread = cmp.Or(cfg.Timers.Reread, DefaultReread)
	k := &Keeper{
		cfg: cfg, reading: make(chan struct{}, 1), seen: map[int]Device{}, before: map[string]int64{},
	}
	k.read(ctx)
	return k
}

// Run reads the devices again and again until ctx ends. On a machine without a program that lists devices it
// returns at once.
func (k *Keeper) Run(ctx context.Context) {
	k.mu.Lock()
	nothing := k.now.Kind == None && k.fault == ""
	k.mu.Unlock()
	if nothing {
		return
	}
	if inv := k.Inventory(); len(inv.Devices) > 0 {
		k.cfg.Log.Info("found devices", slog.String("kind", string(inv.Kind)),
			slog.String("driver", inv.Driver), slog.Int("count", len(inv.Devices)))
	}
	k.logNew()
	again := time.NewTicker(k.cfg.Timers.Reread)
	defer again.Stop()
	for {
		select {
		case <-again.C:
			k.read(ctx)
			k.logNew()
		case <-ctx.Done():
			return
		}
	}
}

// Inventory returns the last good reading. The caller must not change it.
func (k *Keeper) Inventory() Inventory {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.now
}

// Offered returns the devices that placement may use: those to offer without those that were found earlier
// and are not there now.
func (k *Keeper) Offered() []int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.offered()
}

func (k *Keeper) offered() []int {
	if k.cfg.Offer != nil {
		return slices.DeleteFunc(slices.Clone(k.cfg.Offer), func(d int) bool {
			_, wasSeen := k.seen[d]
			return wasSeen && !k.isUsable(d)
		})
	}
	var out []int
	for _, d := range k.now.indices() {
		if k.isUsable(d) && k.isVisible(d) {
			out = append(out, d)
		}
	}
	return out
}

// isUsable reports whether a device was there at the last good reading, without a fault.
func (k *Keeper) isUsable(device int) bool {
	d := k.now.Find(device)
	return d != nil && d.Fault == ""
}

// isVisible reports whether CUDA_VISIBLE_DEVICES of this process names a device, by number or by UUID.
func (k *Keeper) isVisible(device int) bool {
	if k.cfg.Visible == nil {
		return true
	}
	d := k.seen[device]
	for name := range strings.SplitSeq(*k.cfg.Visible, ",") {
		name = strings.TrimSpace(name)
		if name == fmt.Sprint(device) || len(name) > len("GPU-") && strings.HasPrefix(d.UUID, name) {
			return true
		}
	}
	return false
}

// read reads the devices, unless a reading is under way.
func (k *Keeper) read(ctx context.Context) {
	select {
	case k.reading <- struct{}{}:
		defer func() { <-k.reading }()
		k.readNow(ctx)
	default:
	}
}

// readNow reads the devices. The caller has the slot.
func (k *Keeper) readNow(ctx context.Context) {
	limit, cancel := context.WithTimeoutCause(ctx, k.cfg.Timers.Probe,
		fmt.Errorf("no answer within %s", k.cfg.Timers.Probe))
	defer cancel()
	k.mu.Lock()
	k.begun++
	number, old := k.begun, k.now
	k.mu.Unlock()
	used := k.granted()
	inv, err := list(limit, k.cfg.Run)
	if err == nil && old.Kind == inv.Kind && slices.Equal(old.indices(), inv.indices()) {
		inv.Near = old.Near
	} else if err == nil {
		inv.Near = near(limit, k.cfg.Run, &inv)
	}
	if ctx.Err() != nil {
		return // whoever asked has given up
	}
	k.findUnits(&inv)
	usedNow := k.granted() // a rank may have come or gone meanwhile
	k.mu.Lock()
	defer k.mu.Unlock()
	k.ended = number
	if err != nil {
		k.fault, k.failed = err.Error(), time.Now()
		return
	}
	k.take(inv, func(device int) bool { return used[device] || usedNow[device] })
}

// take stores a good reading. The caller holds mu.
func (k *Keeper) take(inv Inventory, isUsed func(device int) bool) {
	k.now, k.fault, k.taken = inv, "", map[int]string{}
	for i := range inv.Devices {
		d := &inv.Devices[i]
		if d.Fault != "" {
			continue
		}
		k.seen[d.Index] = *d
		if _, isKnown := k.before[d.key()]; !isKnown && d.UsedMiB != Unknown {
			k.before[d.key()] = max(0, d.UsedMiB-d.heldMiB())
		}
		if !isUsed(d.Index) && d.UsedMiB > takenFrom {
			k.taken[d.Index] = d.describeTaken()
		}
	}
}

// key tells devices apart over readings.
func (d *Device) key() string { return fmt.Sprintf("%d %s", d.Index, d.UUID) }

// heldMiB is the memory of the processes that the program lists.
func (d *Device) heldMiB() int64 {
	var sum int64
	for _, h := range d.Holders {
		sum += max(0, h.MiB)
	}
	return sum
}

// describeUse says how much memory of a device is in use, and by whom.
func (d *Device) describeUse() string {
	text := fmt.Sprintf("device %d: %s", d.Index, formatGiB(d.UsedMiB))
	if d.TotalMiB > 0 {
		text += " of " + formatGiB(d.TotalMiB)
	}
	text += " GiB are in use"
	for i, h := range d.Holders {
		if i == maxWarnings {
			return text + fmt.Sprintf(" and %d more", len(d.Holders)-i)
		}
		text += [2]string{" by ", ", "}[min(i, 1)] + h.describe()
	}
	return text
}

func formatGiB(mib int64) string { return fmt.Sprintf("%.1f", float64(mib)/1024) }

func (h Holder) describe() string {
	text := fmt.Sprintf("process %d", h.PID)
	if name := cleanText(process.Name(h.PID)); name != "" {
		text += " (" + name + ")"
	}
	if h.Unit != "" {
		text += " of " + h.Unit
	}
	if h.MiB > 0 {
		text += fmt.Sprintf(" with %s GiB", formatGiB(h.MiB))
	}
	return text
}

// note is one thing that a person should know. The key stays while the text changes with each reading.
type note struct{ key, text string }

// Trouble returns what a person should know, with what to do; "" if there is nothing.
func (k *Keeper) Trouble() string {
	notes := k.notes()
	texts := make([]string, len(notes))
	for i, n := range notes {
		texts[i] = n.text
	}
	return strings.Join(texts, "; ")
}

func (k *Keeper) notes() []note {
	used := k.granted()
	k.mu.Lock()
	defer k.mu.Unlock()
	var out []note
	if k.fault != "" {
		out = append(out, note{"fault", "the devices cannot be read: " + k.fault +
			" (run that program by hand; `dmesg` says what the driver has)"})
	}
	out = append(out, k.lost()...)
	if missing := k.missing(); len(missing) > 0 {
		out = append(out, note{
			"missing", fmt.Sprintf("--gpus names devices that are not found: %v (leave these out)", missing),
		})
	}
	for _, index := range k.offered() {
		if text := k.taken[index]; text != "" && !used[index] {
			out = append(out, note{fmt.Sprint("taken ", index), text})
		}
	}
	for _, text := range k.now.Warnings {
		out = append(out, note{text, text})
	}
	return out
}

// lost describes the devices to offer that do not work, or were found earlier and are not there now. The
// caller holds mu.
func (k *Keeper) lost() []note {
	all := slices.Collect(maps.Keys(k.seen))
	all = append(all, k.now.indices()...)
	slices.Sort(all)
	var out []note
	for _, index := range slices.Compact(all) {
		if k.isUsable(index) || !k.isWanted(index) {
			continue
		}
		d, why := k.seen[index], "is not listed any more"
		if now := k.now.Find(index); now != nil {
			d, why = *now, "does not work: "+now.Fault
		}
		out = append(out, note{fmt.Sprint("lost ", index), fmt.Sprintf(
			"device %d (%s, %s) %s and gets no ranks (look for Xid errors in `dmesg`; a reset or a reboot "+
				"may bring it back)", index, d.Name, d.UUID, why)})
	}
	return out
}

// logNew logs the notes that the last call did not have.
func (k *Keeper) logNew() {
	said := map[string]bool{}
	for _, n := range k.notes() {
		if said[n.key] = true; !k.said[n.key] {
			k.cfg.Log.Warn("devices need attention", slog.String("why", n.text))
		}
	}
	if len(said) == 0 && len(k.said) > 0 {
		k.cfg.Log.Info("devices are well again")
	}
	k.said = said
}

// isWanted reports whether a device is to be offered, if it works.
func (k *Keeper) isWanted(device int) bool {
	if k.cfg.Offer != nil {
		return slices.Contains(k.cfg.Offer, device)
	}
	return k.isVisible(device)
}

// missing returns the devices to offer that were never found although others are.
func (k *Keeper) missing() []int {
	if len(k.now.Devices) == 0 {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(k.cfg.Offer), func(d int) bool {
		_, wasSeen := k.seen[d]
		return wasSeen || k.now.Find(d) != nil
	})
}

// errFailing says that no new reading was tried because the last one has just failed.
var errFailing = errors.New("the devices could not be read just now")

// fresh returns a reading that began after the call. After a failure it does not try again before the next
// regular reading, so that programs that hang hold up one start and not each of them.
func (k *Keeper) fresh(ctx context.Context) (Inventory, error) {
	k.mu.Lock()
	next := k.begun + 1
	k.mu.Unlock()
	select {
	case k.reading <- struct{}{}:
		defer func() { <-k.reading }()
	case <-ctx.Done():
		return Inventory{}, context.Cause(ctx)
	}
	if inv, done, err := k.since(next); done {
		return inv, err
	}
	k.readNow(ctx)
	inv, done, err := k.since(next)
	if !done {
		return Inventory{}, context.Cause(ctx)
	}
	return inv, err
}

// since returns the last reading if it is the given one or a later one, or an error if one has failed lately.
func (k *Keeper) since(number int) (inv Inventory, done bool, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.fault != "" && time.Since(k.failed) < k.cfg.Timers.Reread:
		return Inventory{}, true, errFailing
	case k.ended < number:
		return Inventory{}, false, nil
	}
	return k.now, true, nil
}

// Check reports why an engine cannot start on devices. It returns nil if they are there, were only declared,
// or cannot be read. It remembers the memory in use, without that of other units of this node: the caller is
// about to start the engines of a unit on them.
func (k *Keeper) Check(ctx context.Context, unit string, devices []int) error {
	if !k.areFound(devices) {
		return nil
	}
	inv, err := k.fresh(ctx)
	if err != nil {
		return nil // the failure is logged and in Trouble; the engine's start will tell
	}
	others := k.othersThan(unit)
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, index := range devices {
		was, wasSeen := k.seen[index]
		switch d := inv.Find(index); {
		case d == nil && wasSeen:
			return fmt.Errorf("device %d (%s) is not there any more: look at `dmesg` for Xid errors", index,
				was.UUID)
		case d == nil:
		case d.Fault != "":
			return fmt.Errorf("device %d (%s) does not work: %s", index, d.UUID, d.Fault)
		case d.UsedMiB != Unknown && !others.areOn(index): // else what was there before them still counts
			k.before[d.key()] = max(0, d.UsedMiB-others.memoryOn(d))
		}
	}
	return nil
}

// Held describes the devices whose memory the engines of a unit that have ended still hold, with who holds
// it; "" if there are none, or if that cannot be read. What other units of this node may hold does not count.
func (k *Keeper) Held(ctx context.Context, unit string, devices []int) string {
	if !k.areFound(devices) {
		return ""
	}
	inv, err := k.fresh(ctx)
	if err != nil {
		return ""
	}
	others := k.othersThan(unit)
	k.mu.Lock()
	defer k.mu.Unlock()
	var out []string
	for _, index := range devices {
		d := inv.Find(index)
		if d == nil || d.UsedMiB == Unknown {
			continue
		}
		before, isKnown := k.before[d.key()]
		if isKnown && d.UsedMiB > before+others.memoryOn(d)+freeWithin {
			out = append(out, fmt.Sprintf("%s (%s before the start)", d.describeUse(), formatGiB(before)))
		}
	}
	return strings.Join(out, "; ")
}

// areFound reports whether one of the devices was ever found.
func (k *Keeper) areFound(devices []int) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.ContainsFunc(devices, func(d int) bool { _, ok := k.seen[d]; return ok })
}
