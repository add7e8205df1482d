package app

import (
	"reflect"
	"slices"
)

// foldPools returns the application that two pools are. Values that both have are the application's, except
// for sizes, all others are in its sides. Parse of it gives the pools again.
func foldPools(prefill, decode *Application) draft {
	first, second := withoutImplied(*prefill), withoutImplied(*decode)
	ranks := slices.Concat(first.Engine.Ranks, second.Engine.Ranks)
	first.Engine.Ranks, second.Engine.Ranks = nil, nil
	out := draft{Application: second, Prefill: sideOf(&first), Decode: sideOf(&second)}
	out.Name = decode.AppName()
	shared := out.Decode
	foldValues(reflect.ValueOf(&shared).Elem(), reflect.ValueOf(&out.Prefill).Elem(),
		reflect.ValueOf(&out.Decode).Elem())
	devices, others := &first.Resources, &second.Resources
	shared.Resources.GPUsSet = devices.GPUsSet && others.GPUsSet && devices.GPUs == others.GPUs
	if shared.Resources.GPUsSet { // else a side may have a written `gpus: 0`, and the other none
		out.Prefill.Resources.GPUsSet, out.Decode.Resources.GPUsSet = false, false
	}
	if first.Routing.Policy != second.Routing.Policy { // parameters do not go from one policy to another
		shared.Routing, out.Prefill.Routing, out.Decode.Routing = Routing{}, first.Routing, second.Routing
		setDefaults(reflect.ValueOf(&shared.Routing).Elem())
	}
	shared.DataParallel, out.Prefill.DataParallel, out.Decode.DataParallel = DataParallel{},
		first.DataParallel, second.DataParallel
	shared.NumReplicas, out.Prefill.NumReplicas, out.Decode.NumReplicas = 0, first.NumReplicas,
		second.NumReplicas
	shared.Engine.Ranks = ranks
	out.setSide(&shared)
	return out
}

// foldValues resets the values that two sides have in common in both, and the other ones in shared, which is
// a copy of the second side.
func foldValues(shared, first, second reflect.Value) {
	for _, k := range keysOf(shared.Type()) {
		if k.isLater {
			continue
		}
		s, a, b := shared.FieldByIndex(k.field), first.FieldByIndex(k.field), second.FieldByIndex(k.field)
		switch {
		case s.Kind() == reflect.Struct:
			foldValues(s, a, b)
		case reflect.DeepEqual(a.Interface(), b.Interface()):
			k.reset(a)
			k.reset(b)
		default:
			k.reset(s)
		}
	}
}
