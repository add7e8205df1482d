package app

import (
	"cmp"
	"reflect"
	"regexp"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/engineflags"
)

// A shortForm is the key that a scalar stands for where its map is wanted.
type shortForm struct {
	key        string
	isAccepted bool // `model: qwen` is read as `model: {id: qwen}`; others are faults that say what to write
}

func shortFormOf(of reflect.Type) shortForm {
	return map[reflect.Type]shortForm{
		reflect.TypeFor[Model]():          {"id", true},
		reflect.TypeFor[Routing]():        {"policy", true},
		reflect.TypeFor[AttachRank]():     {"url", true},
		reflect.TypeFor[AttachService]():  {"url", true},
		reflect.TypeFor[Engine]():         {"kind", false},
		reflect.TypeFor[DataParallel]():   {"dp_size", false},
		reflect.TypeFor[side]():           {"num_replicas", false},
		reflect.TypeFor[Resources]():      {"gpus", false},
		reflect.TypeFor[Disaggregation](): {"transfer", false},
	}[of]
}

// expand returns the map that a scalar of an accepted short form stands for; every other value as it is.
func (c cursor) expand(of reflect.Type) cursor {
	short := shortFormOf(of)
	if short.isAccepted && c.n.isScalar() && c.n.shape != nullShape {
		c.n = &node{place: c.n.place, shape: mapShape, entries: []entry{{c.n.place, short.key, c.n}}}
	}
	return c
}

// hintMap says what to write in place of a value that is no map.
func (c cursor) hintMap(of reflect.Type) string {
	name := c.path[strings.LastIndexByte(c.path, '.')+1:]
	switch short := shortFormOf(of); {
	case of == nil || !plainKey.MatchString(name):
		return ""
	case of == reflect.TypeFor[Args]():
		return "write each flag as a key: args: {max_model_len: 4096}"
	case short.key != "" && c.n.isScalar():
		return "write " + name + ": {" + short.key + ": " + c.n.describe() + "}"
	case of.Kind() == reflect.Map:
		return "write " + name + ": {KEY: VALUE}"
	}
	return "the keys of " + name + " are " + strings.Join(supported(c.d.keys(of)), ", ")
}

// hintList says what to write in place of a value that is no list.
func (c cursor) hintList() string {
	name := c.path[strings.LastIndexByte(c.path, '.')+1:]
	switch {
	case c.n.shape == mapShape:
		return "write - before each item"
	case c.n.isScalar() && plainKey.MatchString(name):
		return "write " + name + ": [" + c.n.describe() + "]"
	}
	return ""
}

// supported lists the names of the keys that are no later version's.
func supported(keys []key) []string {
	var out []string
	for i := range keys {
		if !keys[i].isLater {
			out = append(out, keys[i].name)
		}
	}
	return out
}

// otherKeys are keys of other tools, with the key that says the same.
//
//nolint:gochecknoglobals // a constant table
var otherKeys = map[string]string{
	"replicas": "num_replicas", "dp": "data_parallel.dp_size", "data_parallel_size": "data_parallel.dp_size",
	"gpus_per_rank": "resources.gpus", "num_gpus": "resources.gpus", "model_id": "model.id",
	"model_source": "model.source", "served_model_name": "model.id", "urls": "engine.ranks",
	"engine_kwargs": "engine.args", "autoscaling": "num_replicas",
}

// suggestKey returns the hint for a key that the map at path does not have.
func (d *decoder) suggestKey(unknown, path string, keys []key) string {
	var all []string
	for i := range keys {
		all = append(all, keys[i].name)
	}
	if meant := didYouMean(unknown, all); meant != "" {
		return meant
	}
	if hint := d.suggestPlace(strings.ReplaceAll(unknown, "-", "_"), path); hint != "" {
		return hint
	}
	here := supported(keys)
	for _, name := range here { // queue for queue_s
		isPart := strings.HasPrefix(name, unknown) || strings.HasSuffix(name, unknown)
		if isPart && len(unknown) > typingError {
			return "did you mean " + strconv.Quote(name) + "?"
		}
	}
	return "the keys here are " + strings.Join(here, ", ")
}

var applicationPath = regexp.MustCompile(`^applications\[\d+\]`)

// suggestPlace says where a key belongs that stands at the wrong place of an application, or beside all of
// them; "" if no map of an application has it.
func (d *decoder) suggestPlace(unknown, path string) string {
	of := reflect.TypeFor[draft]()
	application := applicationPath.FindString(path)
	if application == "" {
		if path == "" && findKey(d.keys(of), unknown) != nil {
			return "it belongs to an application: applications: [{" + unknown + ": ...}]"
		}
		return ""
	}
	around := strings.TrimPrefix(path[len(application):], ".")
	place := cmp.Or(otherKeys[unknown], d.find(of, unknown))
	if place == "" {
		flag := strings.ReplaceAll(unknown, "_", "-")
		if engineflags.Find(engineflags.Sim, flag) == engineflags.Unknown {
			return ""
		}
		place = "engine.args." + unknown
	}
	parent := parentOf(place)
	name := strings.TrimPrefix(place[len(parent):], ".")
	switch parent {
	case around:
		return "write " + name
	case "":
		return name + " belongs beside name and model, not under " + around
	}
	return name + " belongs under " + parent
}

// find returns the path of a key in the maps of a struct, "" if none has it.
func (d *decoder) find(in reflect.Type, name string) string {
	keys := d.keys(in)
	if k := findKey(keys, name); k != nil && !k.isLater {
		return name
	}
	for i := range keys {
		if keys[i].isLater {
			continue
		}
		of := in.FieldByIndex(keys[i].field).Type
		for of.Kind() == reflect.Pointer || of.Kind() == reflect.Slice {
			of = of.Elem()
		}
		if of.Kind() != reflect.Struct || of == reflect.TypeFor[Arg]() {
			continue
		}
		if below := d.find(of, name); below != "" {
			return keys[i].name + "." + below
		}
	}
	return ""
}
