package devices

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const nvidiaSMI = "nvidia-smi"

// csvFormat makes nvidia-smi print one line of values per device or process, sizes in MiB.
const csvFormat = "--format=csv,noheader,nounits"

// listNvidia asks nvidia-smi for the devices and for the processes that hold their memory.
func listNvidia(ctx context.Context, run Runner) (Inventory, error) {
	out, err := run(ctx, nvidiaSMI,
		"--query-gpu=index,uuid,name,memory.total,memory.used,driver_version", csvFormat)
	if errors.Is(err, exec.ErrNotFound) {
		return Inventory{}, err
	}
	inv, none := parseNvidiaDevices(string(out))
	switch {
	case none:
		return inv, nil
	case len(inv.Devices) == 0 && err != nil:
		return Inventory{}, runError(nvidiaSMI, out, err)
	case len(inv.Devices) == 0:
		return Inventory{}, fmt.Errorf("%s lists no device, it prints %q", nvidiaSMI, firstLine(string(out)))
	case err != nil: // it lists the devices that it can reach, and fails because of another one
		inv.warn("%v", runError(nvidiaSMI, nil, err))
	}
	out, err = run(ctx, nvidiaSMI, "--query-compute-apps=gpu_uuid,pid,used_memory", csvFormat)
	if err != nil {
		inv.warn("it is not known which processes hold device memory: %v", runError(nvidiaSMI, out, err))
		return inv, nil
	}
	parseNvidiaHolders(string(out), &inv)
	return inv, nil
}

// Fields of a line of the device query.
const nvidiaFields = 6

// parseNvidiaDevices reads the answer to the device query. none means that nvidia-smi says that there is no
// device. Lines that are no device become warnings.
func parseNvidiaDevices(text string) (inv Inventory, none bool) {
	inv.Kind = Nvidia
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		if strings.HasPrefix(strings.ToLower(line), "no devices were found") {
			none = true
			continue
		}
		d, driver, ok := parseNvidiaDevice(line)
		if !ok || !inv.add(&d) {
			inv.warn("%s: %s", nvidiaSMI, cleanText(line))
			continue
		}
		inv.Driver = driver
	}
	return inv, none && len(inv.Devices) == 0
}

// parseNvidiaDevice reads one line: index, uuid, name, total, used, driver. A name may contain commas.
func parseNvidiaDevice(line string) (d Device, driver string, ok bool) {
	f := strings.Split(line, ",")
	for i := range f {
		f[i] = strings.TrimSpace(f[i])
	}
	n := len(f)
	if n < nvidiaFields {
		return d, "", false
	}
	index, err := strconv.Atoi(f[0])
	if err != nil || index < 0 || index >= maxDevices || f[1] == "" {
		return d, "", false
	}
	d = Device{Index: index, UUID: cleanText(f[1]), Name: cleanText(strings.Join(f[2:n-3], ", "))}
	var totalOK, usedOK bool
	d.TotalMiB, totalOK = parseMiB(f[n-3])
	d.UsedMiB, usedOK = parseMiB(f[n-2])
	for _, field := range f[1 : n-1] {
		if isFault(field) {
			d.Fault = strings.Trim(cleanText(field), "[]")
		}
	}
	if d.Fault == "" && (!totalOK || !usedOK) {
		return d, "", false
	}
	if driver = cleanText(f[n-1]); strings.HasPrefix(driver, "[") {
		driver = ""
	}
	return d, driver, true
}

// parseMiB reads a size. What the driver does not tell is Unknown: "[N/A]", "[Not Supported]",
// "[Insufficient Permissions]".
func parseMiB(s string) (mib int64, ok bool) {
	if strings.HasPrefix(s, "[") || strings.EqualFold(s, "N/A") {
		return Unknown, true
	}
	s = strings.TrimSpace(strings.TrimSuffix(s, "MiB")) // with units, if nounits is not known
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 {
		return Unknown, false
	}
	return n, true
}

// isFault reports whether a field says that the device does not work: "[GPU is lost]", "[GPU requires
// reset]", "[Unknown Error]".
func isFault(field string) bool {
	low := strings.ToLower(field)
	return strings.HasPrefix(low, "[") && (strings.Contains(low, "lost") || strings.Contains(low, "reset") ||
		strings.Contains(low, "error"))
}

// parseNvidiaHolders adds the processes of the answer to the process query to their devices. Other lines,
// such as "No running processes found", are no processes.
func parseNvidiaHolders(text string, inv *Inventory) {
	for line := range strings.Lines(text) {
		f := strings.Split(line, ",")
		if len(f) != 3 {
			continue
		}
		pid, err := strconv.Atoi(strings.TrimSpace(f[1]))
		if err != nil || pid <= 0 {
			continue
		}
		mib, ok := parseMiB(strings.TrimSpace(f[2]))
		if !ok {
			mib = Unknown
		}
		uuid := strings.TrimSpace(f[0])
		for i := range inv.Devices {
			if d := &inv.Devices[i]; d.UUID == uuid && len(d.Holders) < maxHolders {
				d.Holders = append(d.Holders, Holder{PID: pid, MiB: mib})
			}
		}
	}
}

// nearNvidia asks nvidia-smi for the topology.
func nearNvidia(ctx context.Context, run Runner, inv *Inventory) [][]int {
	out, err := run(ctx, nvidiaSMI, "topo", "-m")
	if err != nil {
		return nil
	}
	return parseNvidiaTopology(string(out)).near(inv.indices())
}

var (
	escapes   = regexp.MustCompile("\x1b\\[[0-9;]*[A-Za-z]") // the header is underlined, also in a pipe
	gpuCell   = regexp.MustCompile(`^GPU(\d{1,4})$`)
	linksCell = regexp.MustCompile(`^NV\d+$`)
)

// parseNvidiaTopology reads the matrix of `nvidia-smi topo -m`: cells are separated by tabs, NV# is a direct
// connection of # links, and the column "NUMA Affinity" follows those of the devices. NICs have rows and
// columns too.
func parseNvidiaTopology(text string) topology {
	t := newTopology()
	var columns []int // device number by column, -1 = another column
	numa := -1
	for line := range strings.Lines(escapes.ReplaceAllString(text, "")) {
		cells := strings.Split(strings.TrimRight(line, "\r\n"), "\t")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if columns == nil {
			columns, numa = readHeader(cells)
			continue
		}
		row, ok := numberIn(cells[0], gpuCell)
		if !ok {
			continue
		}
		for i, cell := range cells {
			if i < len(columns) && columns[i] >= 0 && columns[i] != row && linksCell.MatchString(cell) {
				t.link(row, columns[i])
			}
		}
		if numa >= 0 && numa < len(cells) {
			t.setNUMA(row, cells[numa])
		}
	}
	return t
}

// readHeader returns the columns of the devices and that of the NUMA nodes; nil if it is no header.
func readHeader(cells []string) (columns []int, numa int) {
	columns, found := make([]int, len(cells)), false
	for i, cell := range cells {
		columns[i] = -1
		if n, ok := numberIn(cell, gpuCell); ok {
			columns[i], found = n, true
		}
	}
	if !found {
		return nil, -1
	}
	return columns, slices.Index(cells, "NUMA Affinity")
}
