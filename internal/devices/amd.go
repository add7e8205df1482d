package devices

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
)

const rocmSMI = "rocm-smi"

const mib = 1 << 20

// listAMD asks rocm-smi for the devices. It does not tell which process holds memory of which device.
func listAMD(ctx context.Context, run Runner) (Inventory, error) {
	out, err := run(ctx, rocmSMI, "--showproductname", "--showuniqueid", "--showmeminfo", "vram",
		"--showdriverversion", "--json")
	if errors.Is(err, exec.ErrNotFound) {
		return Inventory{}, err
	}
	inv, parseErr := parseAMDDevices(out)
	switch {
	case err != nil && (parseErr != nil || len(inv.Devices) == 0):
		return Inventory{}, runError(rocmSMI, out, err)
	case parseErr != nil:
		return Inventory{}, parseErr
	case err != nil:
		inv.warn("%v", runError(rocmSMI, nil, err))
	}
	return inv, nil
}

// readAMD reads the JSON of rocm-smi: an object per device ("card0") and one for the system, with keys that
// differ in upper and lower case between versions. Values are texts or numbers. Warnings may precede it.
func readAMD(out []byte) (map[string]map[string]string, error) {
	begin := bytes.IndexByte(out, '{')
	if begin < 0 {
		return nil, fmt.Errorf("%s prints no JSON: %q", rocmSMI, firstLine(string(out)))
	}
	var raw map[string]map[string]any
	if err := json.NewDecoder(bytes.NewReader(out[begin:])).Decode(&raw); err != nil {
		return nil, fmt.Errorf("read the JSON of %s: %w", rocmSMI, err)
	}
	all := make(map[string]map[string]string, len(raw))
	for name, fields := range raw {
		values := make(map[string]string, len(fields))
		for key, value := range fields {
			switch v := value.(type) {
			case string:
				values[strings.ToLower(key)] = strings.TrimSpace(v)
			case float64:
				values[strings.ToLower(key)] = strconv.FormatFloat(v, 'f', -1, 64)
			}
		}
		all[strings.ToLower(name)] = values
	}
	return all, nil
}

// cardName is the name of a device in the JSON.
var cardName = regexp.MustCompile(`^card(\d{1,4})$`)

func parseAMDDevices(out []byte) (Inventory, error) {
	inv := Inventory{Kind: AMD}
	all, err := readAMD(out)
	if err != nil {
		return Inventory{}, err
	}
	inv.Driver = cleanText(all["system"]["driver version"])
	for name, fields := range all {
		index, ok := numberIn(name, cardName)
		if !ok {
			continue
		}
		d := Device{
			Index: index, UUID: cleanText(fields["unique id"]),
			Name:     cleanText(firstOf(fields, "card series", "device name", "product name", "card model")),
			TotalMiB: parseBytes(fields["vram total memory (b)"]),
			UsedMiB:  parseBytes(fields["vram total used memory (b)"]),
		}
		inv.add(&d)
	}
	return inv, nil
}

// firstOf returns the first value that is there; some versions write N/A.
func firstOf(fields map[string]string, keys ...string) string {
	for _, key := range keys {
		if v := fields[key]; v != "" && !strings.EqualFold(v, "N/A") {
			return v
		}
	}
	return ""
}

// parseBytes returns a number of bytes in MiB.
func parseBytes(s string) int64 {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 {
		return Unknown
	}
	return n / mib
}

// nearAMD asks rocm-smi for the NUMA nodes and the links between devices.
func nearAMD(ctx context.Context, run Runner, inv *Inventory) [][]int {
	out, err := run(ctx, rocmSMI, "--showtopotype", "--showtoponuma", "--json")
	if err != nil {
		return nil
	}
	t, err := parseAMDTopology(out)
	if err != nil {
		return nil
	}
	return t.near(inv.indices())
}

// linkKey is the key of the kind of link between two devices.
var linkKey = regexp.MustCompile(`^\(topology\) link type between drm devices (\d{1,4}) and (\d{1,4})$`)

func parseAMDTopology(out []byte) (topology, error) {
	t := newTopology()
	all, err := readAMD(out)
	if err != nil {
		return t, err
	}
	for name, fields := range all {
		if card, ok := numberIn(name, cardName); ok {
			t.setNUMA(card, firstOf(fields, "(topology) numa affinity", "(topology) numa node"))
		}
		for key, value := range fields {
			m := linkKey.FindStringSubmatch(key)
			if m == nil || value != "XGMI" {
				continue
			}
			a, errA := strconv.Atoi(m[1])
			b, errB := strconv.Atoi(m[2])
			if errA == nil && errB == nil && a < maxDevices && b < maxDevices {
				t.link(a, b)
			}
		}
	}
	return t, nil
}
